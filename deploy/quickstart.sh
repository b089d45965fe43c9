#!/usr/bin/env bash
# From nothing to answers: installs what is missing, builds, writes a small synthetic Qwen3-MoE checkpoint, serves it
# with two expert-parallel ranks in one process, calls it, and stops what it started.
# usage: deploy/quickstart.sh [--serve DIR] [--listen HOST:PORT]
#   --serve DIR          serve the Hugging Face checkpoint in DIR and keep serving until Ctrl-C
#   --listen HOST:PORT   where (default: a free port of 127.0.0.1; with --serve 127.0.0.1:50051)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly BUILD=build/quickstart
serve="" listen=""
while (($#)); do
  case "$1" in
    --serve) serve=${2:?--serve needs a directory}; shift ;;
    --listen) listen=${2:?--listen needs HOST:PORT}; shift ;;
    -h | --help) sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "quickstart: unknown argument '$1'" >&2; sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
  esac
  shift
done

say() { echo "quickstart: $*"; }

say "installing what is missing"
deploy/install_deps.sh
say "building (the first time takes some minutes)"
cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEXPERTMESH_BUILD_TESTS=OFF --log-level=WARNING
cmake --build "$BUILD" --target expertmesh expertmesh-control-plane expertmesh-expert-server
readonly CLI=$BUILD/bin/expertmesh
readonly SERVER=$BUILD/bin/expertmesh-control-plane

if [[ -n "$serve" ]]; then
  exec "$SERVER" --checkpoint="$serve" --local_ranks=2 --listen="${listen:-127.0.0.1:50051}"
fi

scratch=$(mktemp -d)
server_pid=""
finish() {
  local code=$?
  if [[ -n "$server_pid" ]]; then
    kill -TERM "$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
  fi
  ((code == 0)) || { [[ ! -s "$scratch/server.log" ]] || tail -n 20 "$scratch/server.log" >&2
                     echo "quickstart: FAILED (exit $code)" >&2; }
  rm -rf "$scratch"
}
trap finish EXIT

checkpoint=$scratch/tiny-qwen3-moe
say "writing a synthetic checkpoint"
"$CLI" checkpoint --out="$checkpoint"

say "starting the control plane with two ranks inside"
"$SERVER" --checkpoint="$checkpoint" --local_ranks=2 --listen="${listen:-127.0.0.1:0}" \
  --metrics_listen=127.0.0.1:0 --port_file="$scratch/port" > "$scratch/server.log" 2>&1 &
server_pid=$!
for ((i = 0; i < 600; i++)); do
  [[ ! -s "$scratch/port" ]] || break
  kill -0 "$server_pid" 2>/dev/null || { wait "$server_pid"; exit 1; }
  sleep 0.1
done
[[ -s "$scratch/port" ]] || { say "the server did not open a port within a minute" >&2; exit 1; }
target=127.0.0.1:$(cat "$scratch/port")
cat "$scratch/server.log"

run() { echo; echo "\$ expertmesh ${*/$checkpoint/DIR}"; "$CLI" "$@" --target="$target"; }
run model
run forward --tokens=16 --check="$checkpoint"
run forward --tokens=16 --routing=gate --combine=per_expert --dtype=float32 --check="$checkpoint"
run explain --tokens=64 --max_tokens=3

# Kept as text, so that what is printed is what is run.
grpcurl_call="grpcurl -plaintext -d '{\"layer\": 0, \"topk\": {\"topk\": 2, \"ids\": [0, 1], \"weights\": [0.75, 0.25]},
    \"hidden_states\": {\"shape\": [1, 256], \"values\": ['\$(seq -s, 256)']}}' $target expertmesh.v1.ExpertService/Forward"
echo
if command -v grpcurl >/dev/null; then
  echo "\$ $grpcurl_call"
  eval "$grpcurl_call" > "$scratch/answer.json"
  head -n 12 "$scratch/answer.json"
  echo "  ..."
else
  say "grpcurl is not installed; with it, this call would work while the server runs:"
  echo "$grpcurl_call"
fi

kill -TERM "$server_pid"
wait "$server_pid"
server_pid=""
say "ok: the answers agree with the checkpoint's float64 evaluation; serve your own with deploy/quickstart.sh --serve DIR"
