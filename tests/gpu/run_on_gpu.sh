#!/usr/bin/env bash
# Checks and times ExpertMesh on a GPU in under 8 minutes: facts of the machine, kernels against their references, NCCL
# with one rank, gpu_bench, a control plane and an expert server on the GPU that answer calls, kernels under
# compute-sanitizer. Each part is a process group with a time limit: what fails or hangs does not keep the rest from
# running. One table at the end: of it, a caller that keeps the last 12,000 characters may miss some of the tiles alone.
# usage: run_on_gpu.sh [--bundle FILE.tar.gz] [--out DIR] [--nccl FILE] [--cublas FILE] [--only PART[,PART...]]
#                      [--seconds N]
#   --bundle FILE   of make_bundle.sh; default: the one that this script lies in, else build/expertmesh_gpu_bundle.tar.gz
#   --out DIR       for table.txt, results.json and log.txt (default: $OUT, else ./gpu_results); all three are whole after
#                   every part
#   --nccl, --cublas   libnccl.so.2 and libcublas.so.13 or .12 (default: PyTorch's, or where the loader finds them)
#   --only          of: facts start kernels rank nccl bench serve sanitizer racecheck
#   --seconds N     for all parts together (default 450): each gets its own limit, or what is left
# Exit codes: 0 all passed, 1 something failed, 77 there is no GPU, 2 wrong arguments.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

bundle="" out=${OUT:-$PWD/gpu_results} nccl="" cublas="" only="" seconds=450
while (($#)); do
  case "$1" in
    --bundle | --out | --nccl | --cublas | --only | --seconds)
      (($# > 1)) || { echo "run_on_gpu: $1 has no value" >&2; exit 2; }
      declare "${1#--}=$2"
      shift
      ;;
    -h | --help) sed -n '2,/^set /s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run_on_gpu: unknown argument '$1'" >&2; exit 2 ;;
  esac
  shift
done
[[ "$seconds" =~ ^[0-9]+$ ]] || { echo "run_on_gpu: --seconds is '$seconds', not a number" >&2; exit 2; }
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1

scratch=$(mktemp -d)
running=""
# Waits for nobody: a process that hangs in the driver cannot be ended.
finish() {
  [[ -z "$running" ]] || kill -KILL -- "-$running" 2>/dev/null
  rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

# A pipe that nobody writes to: `pause SECONDS` waits for it in vain.
mkfifo "$scratch/nothing" && exec {nothing}<> "$scratch/nothing" || exit 1
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

# nvidia-smi may hang where a driver is lost; that is for a part with a limit.
if [[ ! -e /dev/nvidiactl ]] && ! nvidia-smi > /dev/null 2>&1; then
  "$bin/gpu_bench"
  echo "run_on_gpu: there is no GPU here" >&2
  exit 77
fi

# ---- Parts: each is `part NAME SECONDS FUNCTION`; its function's exit code is 0, 77 (skipped) or a failure. ------------

names=() outcomes=() times=() notes=()
# What a part's function has to say in the table.
note_file=$scratch/note
note() { echo "$*" >> "$note_file"; }

# await_end PID SECONDS: false when it has not ended by then.
await_end() {
  local end=$((SECONDS + $2))
  while kill -0 "$1" 2>/dev/null; do
    ((SECONDS < end)) || return 1
    pause 0.1
  done
}

part() {
  local name=$1 limit=$2 work=$3 code start=$SECONDS outcome pid left=$((seconds - SECONDS)) log=$scratch/$1.log
  [[ -z "$only" || ",$only," == *",${name%%_*},"* ]] || return 0
  ((limit <= left)) || limit=$left
  : > "$note_file"
  : > "$log"
  if ((limit < 1)); then
    code=124
    note "no time was left"
  else
    echo "== $name (at most $limit s)"
    # In a process group of its own, so that all of it can be ended.
    set -m
    ( trap - EXIT; "$work" ) > "$log" 2>&1 < /dev/null &
    pid=$!
    set +m
    running=$pid
    if await_end "$pid" "$limit"; then
      wait "$pid"
      code=$?
    else
      code=124
      kill -TERM -- "-$pid" 2>/dev/null
      await_end "$pid" 2
      # What expert servers had said, which a part that ends prints itself.
      [[ $name != serve ]] || cat "$scratch"/*.rank >> "$log" 2>/dev/null
    fi
    # What it left behind would keep memory of the GPU.
    kill -KILL -- "-$pid" 2>/dev/null
    if await_end "$pid" 5; then wait "$pid" 2>/dev/null; else note "its process cannot be ended"; fi
    running=""
  fi
  case $code in
    0) outcome=passed ;;
    77) outcome=skipped ;;
    124) outcome=timeout ;;
    *) outcome=FAILED ;;
  esac
  if [[ $outcome == timeout ]] && grep -q '^\[ RUN ' "$log"; then
    note "$(grep -c '^\[       OK ' "$log") tests had passed, in $(grep '^\[ RUN ' "$log" | tail -n 1 | cut -c 14-)"
  fi
  names+=("$name") outcomes+=("$outcome") times+=($((SECONDS - start)))
  notes+=("$(tr '\n\t' '  ' < "$note_file")")
  echo "== $name: $outcome after $((SECONDS - start)) s ${notes[-1]}"
  [[ $outcome == passed || $outcome == skipped ]] || tail -n 15 "$log" | cut -c -300
  {
    echo "==== $name: $outcome after $((SECONDS - start)) s ${notes[-1]}"
    tail -c 1000000 "$log"
  } >> "$out/log.txt"
  report
}

facts() {
  date -u
  uname -a
  ldd --version | head -n 1
  command -v nvcc && nvcc --version
  free -g
  df -h "$scratch"
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
  note "$(grep -E '^\[  (PASSED|FAILED)  \] [0-9]+ test' "$2" | tail -n 2 | sed 's/^\[ *//; s/ *\]//')"
  return "$1"
}

# A kernel that fails takes its process with it, and one that hangs all of the time: then each suite runs by itself.
kernels() {
  local log=$scratch/kernels.txt code suite suites program=$bin/kernels_cuda_gpu_test
  # --foreground: in this part's process group.
  timeout --foreground -k 2 70 "$program" 2>&1 | tee "$log"
  gtest "${PIPESTATUS[0]}" "$log"
  code=$?
  ((code != 0 && code != 77)) || return "$code"
  mapfile -t suites < <("$program" --gtest_list_tests | grep -oE '^[A-Za-z0-9_/]+\.( |$)')
  note "alone:"
  for suite in "${suites[@]}"; do
    timeout --foreground -k 2 20 "$program" --gtest_filter="${suite%% *}*" > "$log" 2>&1
    code=$?
    if ((code == 124 || code == 137)); then
      note "$suite hangs,"
    elif ((code != 0)); then
      note "$suite fails with $code,"
    fi
    cat "$log"
  done
  return 1
}

rank() {
  local log=$scratch/rank.txt
  "$bin/server_rank_gpu_test" 2>&1 | tee "$log"
  gtest "${PIPESTATUS[0]}" "$log"
}

nccl() {
  local log=$scratch/nccl.txt code
  NCCL_LIBRARY=$nccl NCCL_DEBUG=WARN "$bin/server_comm_nccl_gpu_test" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  note "$(grep -m1 -E '^NCCL [0-9]' "$log")"
  gtest "$code" "$log"
}

find_sanitizer() {
  local file
  for file in "$(command -v compute-sanitizer)" "$(dirname "$(command -v nvcc)")/compute-sanitizer" \
    /usr/local/cuda*/bin/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer \
    /opt/nvidia/*/compute-sanitizer; do
    [[ ! -f "$file" || ! -x "$file" ]] || { echo "$file"; return; }
  done
}

# sanitize FILTER ARGUMENT...: the kernels' tests of that filter under compute-sanitizer, which watches what runs on the
# GPU; the host's side is the address sanitizer's, on a CPU. Without the grouped GEMM's own tests: its tensor core kernels
# and large shapes take minutes there.
sanitize() {
  local sanitizer log=$scratch/sanitize.txt code filter=$1
  shift
  sanitizer=$(find_sanitizer)
  [[ -n "$sanitizer" ]] || { note "no compute-sanitizer here"; return 77; }
  # By itself rather than by bin/, whose shell would be watched, too.
  LD_LIBRARY_PATH=$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} "$sanitizer" "$@" --error-exitcode 9 --print-limit 20 \
    "$root/libexec/kernels_cuda_gpu_test" --gtest_filter="$filter" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  if ((code != 0)) && grep -qi 'device not supported' "$log"; then
    note "compute-sanitizer does not support this machine's GPU"
    return 77
  fi
  note "$(grep -m1 -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | sed 's/^=* *//')"
  gtest "$code" "$log"
}
# Of what stands behind kernels/'s interfaces the 16-bit types alone, for time. "Not ready" of an event is an answer, no
# error.
sanitizer() { sanitize '-GroupedGemmTest.*:*Large*:Cuda/*float32*' --tool memcheck --report-api-errors no; }
# The kernels whose threads meet in shared memory.
racecheck() { sanitize 'SimtGroupedGemmTest.*:QuantizeRowsTest.RowsLongerThanTheRegisters' --tool racecheck; }

# await FILE PID TEXT: until the file has the text; fails when the process ends first or after half a minute.
await() {
  local end=$((SECONDS + 30))
  until grep -qs "$3" "$1"; do
    ((SECONDS < end)) && kill -0 "$2" 2>/dev/null || return 1
    pause 0.1
  done
}

# serve_model NAME TOKENS SAMPLES ARGUMENT...: one model's calls, each checked against a float64 evaluation of its
# checkpoint, which for a large one takes seconds for a hundred tokens.
serve_model() {
  local name=$1 tokens=$2 samples=$3 checkpoint=$scratch/$1 control_plane rank target dtype i code=0
  shift 3
  "$bin/expertmesh" checkpoint --out="$checkpoint" "$@" || return 1
  "$bin/expertmesh-control-plane" --checkpoint="$checkpoint" --ep_size=1 --rank_listen=127.0.0.1:0 \
    --rank_port_file="$scratch/$name.rank_port" --listen=127.0.0.1:0 --port_file="$scratch/$name.port" \
    --metrics_listen= --allow_admin &
  control_plane=$!
  if ! await "$scratch/$name.rank_port" "$control_plane" . || ! await "$scratch/$name.port" "$control_plane" .; then
    note "$name: the control plane did not start"
    kill -KILL "$control_plane" 2>/dev/null
    return 1
  fi
  "$bin/expertmesh-expert-server" --control_plane="127.0.0.1:$(< "$scratch/$name.rank_port")" --ep_rank=0 --ep_size=1 \
    --checkpoint="$checkpoint" --device=cuda:0 ${nccl:+--nccl_library="$nccl"} 2> "$scratch/$name.rank" &
  rank=$!
  target=127.0.0.1:$(< "$scratch/$name.port")
  if ! await "$scratch/$name.rank" "$rank" 'joined the group'; then
    cat "$scratch/$name.rank"
    note "$name: the expert server did not join"
    kill -KILL "$control_plane" "$rank" 2>/dev/null
    return 1
  fi
  for dtype in bfloat16 float32; do
    for i in 1 16 "$tokens"; do
      "$bin/expertmesh" forward --target="$target" --timeout=60s --tokens="$i" --dtype="$dtype" --check="$checkpoint" ||
        code=1
    done
  done
  "$bin/expertmesh" forward --target="$target" --tokens=16 --routing=gate --check="$checkpoint" || code=1
  "$bin/expertmesh" bench --target="$target" --tokens=64 --concurrency=8 --warmup=1s --duration=3s \
    --samples="$samples" --check="$checkpoint" || code=1
  "$bin/expertmesh" status --target="$target" || code=1
  kill -0 "$rank" 2>/dev/null || { note "$name: the expert server ended"; code=1; }
  kill -TERM "$control_plane" "$rank" 2>/dev/null
  wait "$control_plane" "$rank"
  cat "$scratch/$name.rank"
  rm -rf "$checkpoint"
  ((code == 0)) && note "$name: calls agree with float64,"
  return "$code"
}

serve() {
  local code=0
  serve_model small 100 16 || code=1
  serve_model fp8 100 8 --architecture=DeepseekV3ForCausalLM --weight_dtype=float8_e4m3 --hidden_size=1024 \
    --intermediate_size=512 --num_experts=32 --experts_per_token=8 --num_layers=1 || code=1
  serve_model wide 64 2 --hidden_size=2048 --intermediate_size=768 --num_experts=128 --experts_per_token=8 \
    --num_layers=1 || code=1
  return "$code"
}

bench() {
  # cuBLAS comes in several files, of which one opens the next.
  if [[ -n "$cublas" ]]; then
    LD_LIBRARY_PATH=$(dirname "$cublas")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
  fi
  "$bin/gpu_bench" --only="$1" --json="$scratch/bench_$1.json" ${cublas:+--cublas="$cublas"}
}
bench_rows() { bench rows; }
bench_prefill() { bench prefill; }
bench_deepseek() { bench deepseek; }
bench_step() { bench step; }
bench_tiles() { bench tiles; }

# ---- Report ---------------------------------------------------------------------------------------------------------------

# table.txt and results.json of the parts so far.
report() {
  local i
  for i in "${!names[@]}"; do
    printf '%s\t%s\t%s\t%s\n' "${names[i]}" "${outcomes[i]}" "${times[i]}" "${notes[i]}"
  done > "$scratch/parts.tsv"
  python3 - "$scratch" "$out" "$(< "$root/commit")" "$SECONDS" <<'PYTHON'
import datetime
import json
import pathlib
import sys

scratch, out, commit, seconds = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
parts = [line.split("\t") for line in (scratch / "parts.tsv").read_text().splitlines()]
bench = {}
# What may be cut off at the top comes first.
for part in ("tiles", "rows", "prefill", "deepseek", "step"):
    file = scratch / f"bench_{part}.json"
    if file.exists():
        bench[part] = json.loads(file.read_text())

lines = []
seen = set()
for part, figures in bench.items():
    if part == "rows":
        seen.clear()  # the tiles' may be cut off, and the limits with them
    lines.append(f"{part}, {figures['device']}")
    for row in figures["results"]:
        if row["value"] is None:
            continue  # no number, in JSON
        # The limits, which each part finds again.
        if (row["name"], row["unit"]) in seen and "limit" not in row:
            continue
        seen.add((row["name"], row["unit"]))
        text = f"{row['name']:<60} {row['value']:8.1f} {row['unit']:<7}"
        if "ratio" in row:
            text += f" {row['ratio']:5.2f} of {row['limit']:.0f} {row['limit_name']}"
        if "target" in row:
            text += f" (>= {row['target']:.2f}: {'yes' if row['ratio'] >= row['target'] else 'NO'})"
        if not row["right"]:
            text += f"  WRONG: {row['check']}"
        lines.append(text.rstrip())
    lines.append("")
lines.append(f"{'part':<15} {'outcome':<8} {'s':>4}  note")
lines += [f"{name:<15} {outcome:<8} {taken:>4}  {note[:300]}" for name, outcome, taken, note in parts]
lines.append(f"{date} commit {commit} {seconds} s in all")
(out / "table.txt").write_text("\n".join(lines) + "\n")
result = {
    "date": date,
    "commit": commit,
    "seconds": int(seconds),
    "parts": [dict(zip(("part", "outcome", "seconds", "note"), row)) for row in parts],
    "bench": bench,
}
(out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
PYTHON
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

: > "$out/log.txt"
part facts 30 facts
part start 30 start
part kernels 120 kernels
part rank 40 rank
part nccl 40 nccl
part bench_rows 40 bench_rows
part bench_prefill 60 bench_prefill
part bench_deepseek 60 bench_deepseek
part bench_step 40 bench_step
part serve 100 serve
part sanitizer 60 sanitizer
part racecheck 20 racecheck
part bench_tiles 50 bench_tiles

echo
if [[ -s "$out/table.txt" ]]; then cat "$out/table.txt"; else cat "$scratch/parts.tsv"; fi
code=0
for outcome in "${outcomes[@]}"; do
  [[ $outcome == passed || $outcome == skipped ]] || code=1
done
exit "$code"
