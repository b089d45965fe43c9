#!/usr/bin/env bash
# From nothing to answers: installs what is missing, builds, writes a small synthetic Qwen3-MoE checkpoint, serves it
# with two expert-parallel ranks in one process, calls it, and stops what it started.
# usage: deploy/quickstart.sh [--serve DIR] [--listen HOST:PORT] [-- FLAGS]
#   --serve DIR          serve the Hugging Face checkpoint in DIR and keep serving until Ctrl-C
#   --listen HOST:PORT   where (default: a free port of 127.0.0.1; with --serve 127.0.0.1:50051, and metrics on
#                        127.0.0.1:9464; another place with --serve: metrics where its log says)
#   -- FLAGS             passed to expertmesh-control-plane, e.g. -- --local_ranks=4 --max_deadline=10s
# On loopback it serves `expertmesh status` as well (--allow_admin); on other addresses, where whoever reaches the port
# could then stop the service, that takes -- --allow_admin.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set /s/^# //p' deploy/quickstart.sh; }
say() { echo "quickstart: $*"; }
die() { echo "quickstart: $*" >&2; exit 1; }
usage_error() {
  echo "quickstart: $*" >&2
  usage >&2
  exit 2
}

readonly BUILD=build/quickstart
serve="" listen="" flags=()
while (($#)); do
  name=${1%%=*}
  case "$1" in
    --serve=* | --listen=*) value=${1#*=} ;;
    --serve | --listen)
      (($# > 1)) || usage_error "$name has no value"
      value=$2
      shift
      ;;
    --) shift; flags=("$@"); break ;;
    -h | --help) usage; exit 0 ;;
    *) usage_error "there is no option '$name'; the control plane's own flags come after --" ;;
  esac
  case "$name" in
    --serve) [[ -n "$value" ]] || usage_error "--serve is empty; it takes a folder"; serve=$value ;;
    --listen) [[ "$value" =~ ^.+:[0-9]+$ ]] || usage_error "--listen is '$value'; it takes HOST:PORT"; listen=$value ;;
  esac
  shift
done
# The path is the caller's.
[[ -z "$serve" || "$serve" == /* ]] || serve=$caller/$serve
case "${listen:-127.0.0.1:0}" in
  127.* | localhost:* | "[::1]:"*) flags=(--allow_admin "${flags[@]}") ;;
esac
[[ -z "$serve" || -f "$serve/config.json" ]] || die "--serve: there is no $serve/config.json"

say "installing what is missing"
deploy/install_deps.sh
say "building (the first time takes some minutes)"
cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DEXPERTMESH_BUILD_TESTS=OFF --log-level=WARNING
cmake --build "$BUILD" --target expertmesh expertmesh-control-plane expertmesh-expert-server
readonly CLI=$BUILD/bin/expertmesh
readonly SERVER=$BUILD/bin/expertmesh-control-plane

if [[ -n "$serve" ]]; then
  # A second server on this machine needs another port for its metrics as well.
  [[ -z "$listen" || "$listen" == 127.0.0.1:50051 ]] || flags=(--metrics_listen=127.0.0.1:0 "${flags[@]}")
  listen=${listen:-127.0.0.1:50051}
  say "serving $serve on $listen until Ctrl-C; \`$CLI help\` tells what to try in another terminal"
  exec "$SERVER" --checkpoint="$serve" --local_ranks=2 --listen="$listen" "${flags[@]}"
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
  --metrics_listen=127.0.0.1:0 --port_file="$scratch/port" "${flags[@]}" > "$scratch/server.log" 2>&1 &
server_pid=$!
for ((i = 0; i < 600; i++)); do
  [[ ! -s "$scratch/port" ]] || break
  if ! kill -0 "$server_pid" 2>/dev/null; then
    code=0
    wait "$server_pid" || code=$?
    server_pid=""
    say "the server ended with exit code $code:"
    exit 1
  fi
  sleep 0.1
done
[[ -s "$scratch/port" ]] || die "the server did not open a port within a minute"
target=${listen:-127.0.0.1:0}
target=${target%:*}:$(<"$scratch/port")
cat "$scratch/server.log"

run() { echo; echo "\$ expertmesh ${*/$checkpoint/DIR}"; "$CLI" "$@" --target="$target"; }
run model
run forward --tokens=16 --check="$checkpoint"
run forward --tokens=16 --routing=gate --combine=per_expert --dtype=float32 --check="$checkpoint"
run explain --tokens=64 --max_tokens=3
[[ " ${flags[*]} " != *" --allow_admin "* ]] || run status

# Kept as text, so that what is printed is what is run.
grpcurl_call="grpcurl -plaintext -d '{\"layer\": 0, \"topk\": {\"topk\": 2, \"ids\": [0, 1], \"weights\": [0.75, 0.25]},
    \"hidden_states\": {\"shape\": [1, 256], \"values\": ['\$(seq -s, 256)']}}' $target expertmesh.v1.ExpertService/Forward"
echo
if command -v grpcurl >/dev/null; then
  echo "\$ $grpcurl_call"
  eval "$grpcurl_call" > "$scratch/answer.json"
  # All of it but most of the output's 256 values.
  awk '/"values": \[/ { print; num_values = 1; next }
       num_values && /\]/ { printf "      ... %d in all\n", num_values - 1; num_values = 0 }
       num_values { if (num_values <= 4) print; num_values++; next }
       { print }' "$scratch/answer.json"
else
  say "grpcurl is not installed (deploy/install_deps.sh --test builds it); with it, this call works while a server runs:"
  echo "$grpcurl_call"
fi

kill -TERM "$server_pid"
wait "$server_pid"
server_pid=""
say "ok: the answers agree with the checkpoint's float64 evaluation; serve your own with deploy/quickstart.sh --serve DIR"
