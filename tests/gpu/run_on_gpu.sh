#!/usr/bin/env bash
# Checks and times ExpertMesh on a GPU in under 8 minutes: facts of the machine, kernels against their references, the
# same under compute-sanitizer, NCCL with one rank, a control plane and an expert server on the GPU that answer calls,
# then gpu_bench. Each part has a time limit, and what fails does not keep the rest from running. One table at the end.
# usage: run_on_gpu.sh [--bundle FILE.tar.gz] [--out DIR] [--nccl FILE] [--cublas FILE] [--only PART[,PART...]]
#   --bundle FILE   of make_bundle.sh; default: the one that this script lies in, else build/expertmesh_gpu_bundle.tar.gz
#   --out DIR       for results.json, table.txt and the logs (default: $OUT, else ./gpu_results)
#   --nccl, --cublas   libnccl.so.2 and libcublas.so.13 or .12 (default: PyTorch's, or where the loader finds them)
#   --only          of: facts start kernels rank nccl serve bench sanitizer racecheck
# Exit codes: 0 all passed, 1 something failed, 77 there is no GPU, 2 wrong arguments.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

bundle="" out=${OUT:-$PWD/gpu_results} nccl="" cublas="" only=""
while (($#)); do
  case "$1" in
    --bundle | --out | --nccl | --cublas | --only)
      (($# > 1)) || { echo "run_on_gpu: $1 has no value" >&2; exit 2; }
      declare "${1#--}=$2"
      shift
      ;;
    -h | --help) sed -n '2,/^set /s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run_on_gpu: unknown argument '$1'" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out/logs" && out=$(cd "$out" && pwd) || exit 1

scratch=$(mktemp -d)
servers=()
finish() {
  ((${#servers[@]} == 0)) || kill -TERM "${servers[@]}" 2>/dev/null
  wait
  rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

# A pipe that nobody writes to: `pause SECONDS` waits for it in vain.
exec {nothing}<> <(:)
pause() { read -r -t "$1" -u "$nothing" || true; }

if [[ -z "$bundle" && -d "$here/libexec" ]]; then
  root=$here
else
  bundle=${bundle:-build/expertmesh_gpu_bundle.tar.gz}
  [[ -f "$bundle" ]] || { echo "run_on_gpu: there is no bundle $bundle; make_bundle.sh makes one" >&2; exit 2; }
  tar -C "$scratch" -xzf "$bundle" || exit 1
  root=$scratch/expertmesh_gpu
fi
bin=$root/bin

if ! nvidia-smi > /dev/null 2>&1; then
  "$bin/gpu_bench"
  echo "run_on_gpu: there is no GPU here" >&2
  exit 77
fi

# ---- Parts: each is `part NAME SECONDS FUNCTION`; its function's exit code is 0, 77 (skipped) or a failure. ------------

names=() outcomes=() times=() notes=()
# What a part's function has to say in the table.
note_file=$scratch/note
note() { echo "$*" >> "$note_file"; }

part() {
  local name=$1 limit=$2 work=$3 code start=$SECONDS outcome pid waited
  [[ -z "$only" || ",$only," == *",$name,"* ]] || return 0
  : > "$note_file"
  echo "== $name (at most $limit s)"
  # In a process group of its own, so that all of it can be ended.
  set -m
  ( trap - EXIT; "$work" ) > "$out/logs/$name.log" 2>&1 < /dev/null &
  pid=$!
  set +m
  for ((waited = 0; waited < limit * 10; waited++)); do
    kill -0 "$pid" 2>/dev/null || break
    pause 0.1
  done
  if kill -0 "$pid" 2>/dev/null; then
    kill -TERM -- "-$pid" 2>/dev/null
    pause 2
    kill -KILL -- "-$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    code=124
  else
    wait "$pid"
    code=$?
  fi
  case $code in
    0) outcome=passed ;;
    77) outcome=skipped ;;
    124) outcome=timeout ;;
    *) outcome=FAILED ;;
  esac
  names+=("$name") outcomes+=("$outcome") times+=($((SECONDS - start)))
  notes+=("$(tr '\n' ' ' < "$note_file")")
  echo "== $name: $outcome after $((SECONDS - start)) s $(tr '\n' ' ' < "$note_file")"
  [[ $outcome == passed || $outcome == skipped ]] || tail -n 25 "$out/logs/$name.log"
}

facts() {
  date -u
  uname -a
  ldd --version | head -n 1
  nvcc --version || true
  cat "$root/commit"
  command -v nvidia-smi > /dev/null || { note "no nvidia-smi"; return 1; }
  nvidia-smi || return 1
  note "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1)"
}

start() {
  local program
  for program in expertmesh expertmesh-control-plane expertmesh-expert-server; do
    "$bin/$program" --version || return 1
  done
  note "commit $(< "$root/commit")"
}

# gtest CODE LOG: a GoogleTest program ended with CODE.
gtest() {
  if (($1 == 0)) && grep -q 'no GPU' "$2"; then
    note "no GPU"
    return 77
  fi
  note "$(gtest_note "$2")"
  return "$1"
}
gtest_note() { grep -E '^\[  (PASSED|FAILED)  \] [0-9]+ test' "$1" | tail -n 2 | sed 's/^\[ *//; s/ *\]//'; }

kernels() {
  local log=$scratch/kernels.txt code
  "$bin/kernels_cuda_gpu_test" --gtest_brief=1 --gtest_output=json:"$out/logs/kernels.json" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  gtest "$code" "$log"
}

rank() {
  local log=$scratch/rank.txt code
  "$bin/server_rank_gpu_test" --gtest_brief=1 --gtest_output=json:"$out/logs/rank.json" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  gtest "$code" "$log"
}

nccl() {
  local log=$scratch/nccl.txt code
  NCCL_LIBRARY=$nccl NCCL_DEBUG=WARN "$bin/server_comm_nccl_gpu_test" \
    --gtest_output=json:"$out/logs/nccl.json" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  note "$(grep -m1 -E '^NCCL [0-9]' "$log")"
  gtest "$code" "$log"
}

# sanitize TOOL FILTER: the kernels' tests of that filter under compute-sanitizer, which watches what runs on the GPU; the
# host's side is the address sanitizer's, on a CPU. Without the grouped GEMM's own tests: its tensor core kernels and
# large shapes take minutes there.
sanitize() {
  local sanitizer log=$scratch/$1.txt code
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
  [[ -n "$sanitizer" ]] || { note "no compute-sanitizer here"; return 77; }
  LD_LIBRARY_PATH=$root/lib "$sanitizer" --tool "$1" --error-exitcode 9 "$root/libexec/kernels_cuda_gpu_test" \
    --gtest_brief=1 --gtest_filter="$2" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  note "$(grep -m1 -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | sed 's/^=* *//')"
  gtest "$code" "$log"
}
sanitizer() { sanitize memcheck '-GroupedGemmTest.*:*Large*'; }
# The kernels whose threads meet in shared memory.
racecheck() { sanitize racecheck 'SimtGroupedGemmTest.*:QuantizeRowsTest.RowsLongerThanTheRegisters'; }

# await FILE PID: until the file has content; fails when the process ends first or after a minute.
await() {
  local i
  for ((i = 0; i < 600; i++)); do
    [[ ! -s "$1" ]] || return 0
    kill -0 "$2" 2>/dev/null || return 1
    pause 0.1
  done
  return 1
}

# One model's calls, each checked against a float64 evaluation of its checkpoint.
serve_model() {
  local name=$1 checkpoint=$scratch/$1 control_plane rank target dtype i
  shift
  "$bin/expertmesh" checkpoint --out="$checkpoint" "$@" || return 1
  "$bin/expertmesh-control-plane" --checkpoint="$checkpoint" --ep_size=1 --rank_listen=127.0.0.1:0 \
    --rank_port_file="$scratch/$name.rank_port" --listen=127.0.0.1:0 --port_file="$scratch/$name.port" \
    --metrics_listen= --allow_admin &
  control_plane=$!
  await "$scratch/$name.rank_port" "$control_plane" && await "$scratch/$name.port" "$control_plane" ||
    { note "$name: the control plane did not start"; return 1; }
  "$bin/expertmesh-expert-server" --control_plane="127.0.0.1:$(< "$scratch/$name.rank_port")" --ep_rank=0 --ep_size=1 \
    --checkpoint="$checkpoint" --device=cuda:0 ${nccl:+--nccl_library="$nccl"} 2> "$scratch/$name.rank" &
  rank=$!
  target=127.0.0.1:$(< "$scratch/$name.port")
  local code=0
  until grep -q 'joined the group' "$scratch/$name.rank"; do
    kill -0 "$rank" 2>/dev/null || { cat "$scratch/$name.rank"; note "$name: the expert server ended"; return 1; }
    pause 0.1
  done
  for dtype in bfloat16 float32; do
    for i in 1 16 100; do
      "$bin/expertmesh" forward --target="$target" --timeout=60s --tokens="$i" --dtype="$dtype" --check="$checkpoint" ||
        code=1
    done
  done
  "$bin/expertmesh" forward --target="$target" --tokens=16 --routing=gate --check="$checkpoint" || code=1
  "$bin/expertmesh" bench --target="$target" --tokens=64 --concurrency=8 --warmup=1s --duration=4s --check="$checkpoint" |
    tee "$scratch/$name.bench" || code=1
  "$bin/expertmesh" status --target="$target" || code=1
  kill -0 "$rank" 2>/dev/null || { note "$name: the expert server ended"; code=1; }
  kill -TERM "$control_plane" "$rank" 2>/dev/null
  wait "$control_plane" "$rank"
  cat "$scratch/$name.rank"
  ((code == 0)) && note "$name: calls agree with float64"
  return "$code"
}

serve() {
  local code=0
  serve_model small || code=1
  serve_model wide --hidden_size=2048 --intermediate_size=768 --num_experts=128 --experts_per_token=8 --num_layers=1 ||
    code=1
  serve_model fp8 --architecture=DeepseekV3ForCausalLM --weight_dtype=float8_e4m3 --hidden_size=1024 \
    --intermediate_size=512 --num_experts=32 --experts_per_token=8 --num_layers=1 || code=1
  return "$code"
}

bench() {
  "$bin/gpu_bench" --json="$out/bench.json" ${cublas:+--cublas="$cublas"} | tee "$out/bench.txt"
  local code=${PIPESTATUS[0]}
  return "$code"
}

# PyTorch brings both, in folders that no loader looks into.
find_library() {
  python3 - "$1" <<'PYTHON' 2>/dev/null
import glob
import site
import sys

folders = site.getsitepackages() + [site.getusersitepackages()] + sys.path
for folder in dict.fromkeys(folders):
    found = sorted(glob.glob(f"{folder}/nvidia/*/lib/{sys.argv[1]}") + glob.glob(f"{folder}/torch/lib/{sys.argv[1]}"))
    if found:
        print(found[-1])
        break
PYTHON
}
[[ -n "$nccl" ]] || nccl=$(find_library libnccl.so.2)
[[ -n "$cublas" ]] || cublas=$(find_library libcublas.so.13)
[[ -n "$cublas" ]] || cublas=$(find_library libcublas.so.12)
echo "NCCL: ${nccl:-where the loader finds it}; cuBLAS: ${cublas:-where the loader finds it}"

# 480 s in all at the very most.
part facts 20 facts
part start 10 start
part kernels 80 kernels
part rank 30 rank
part nccl 30 nccl
part serve 100 serve
part bench 130 bench
part sanitizer 60 sanitizer
part racecheck 20 racecheck

# ---- Table ----------------------------------------------------------------------------------------------------------------

{
  echo
  [[ ! -s "$out/bench.txt" ]] || { cat "$out/bench.txt"; echo; }
  printf '%-10s %-8s %5s  %s\n' part outcome s note
  for i in "${!names[@]}"; do
    printf '%-10s %-8s %5s  %s\n' "${names[i]}" "${outcomes[i]}" "${times[i]}" "${notes[i]}"
  done
  echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) commit $(< "$root/commit") $SECONDS s in all"
} | tee "$out/table.txt"
for i in "${!names[@]}"; do
  printf '%s\t%s\t%s\t%s\n' "${names[i]}" "${outcomes[i]}" "${times[i]}" "${notes[i]}"
done > "$scratch/parts.tsv"
python3 - "$scratch/parts.tsv" "$out" "$(< "$root/commit")" <<'PYTHON'
import datetime
import json
import pathlib
import sys

parts, out, commit = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
rows = [line.split("\t") for line in parts.read_text().splitlines()]
bench = out / "bench.json"
result = {
    "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    "commit": commit,
    "parts": [dict(zip(("part", "outcome", "seconds", "note"), row)) for row in rows],
    "bench": json.loads(bench.read_text()) if bench.exists() else None,
}
(out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
PYTHON

code=0
for outcome in "${outcomes[@]}"; do
  [[ $outcome == passed || $outcome == skipped ]] || code=1
done
exit "$code"
