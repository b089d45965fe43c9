#!/usr/bin/env bash
# A control plane and N expert servers, each a process of its own, on loopback; stops them all on exit (Ctrl-C).
# usage: deploy/local_cluster.sh N [--checkpoint DIR] [--listen HOST:PORT] [--bin DIR]
#   --checkpoint DIR     Hugging Face checkpoint (default: a small synthetic one, written anew)
#   --listen HOST:PORT   where clients call (default 127.0.0.1:50051; port 0: the system chooses)
#   --bin DIR            programs that are built already (default: installs what is missing and builds them)
# An expert server that dies is started again after a second: kill -9 one, and watch calls go on. One that is asked to stop (SIGTERM) is not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}"; }
num_ranks="" checkpoint="" listen=127.0.0.1:50051 bin=""
while (($#)); do
  case "$1" in
    --checkpoint) checkpoint=${2:?--checkpoint needs a directory}; shift ;;
    --listen) listen=${2:?--listen needs HOST:PORT}; shift ;;
    --bin) bin=${2:?--bin needs a directory}; shift ;;
    -h | --help) usage; exit 0 ;;
    *[!0-9]* | "") echo "local_cluster: unknown argument '$1'" >&2; usage >&2; exit 2 ;;
    *) num_ranks=$1 ;;
  esac
  shift
done
((num_ranks > 0)) || { echo "local_cluster: how many ranks?" >&2; usage >&2; exit 2; }

say() { echo "local_cluster: $*"; }

if [[ -z "$bin" ]]; then
  deploy/install_deps.sh
  cmake -S . -B build/quickstart -G Ninja -DCMAKE_BUILD_TYPE=Release -DEXPERTMESH_BUILD_TESTS=OFF --log-level=WARNING
  cmake --build build/quickstart --target expertmesh expertmesh-control-plane expertmesh-expert-server
  bin=build/quickstart/bin
fi

scratch=$(mktemp -d)
pids=()
finish() {
  trap - EXIT INT TERM
  ((${#pids[@]} == 0)) || kill -TERM "${pids[@]}" 2>/dev/null || true
  wait || true
  rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 0' INT TERM

if [[ -z "$checkpoint" ]]; then
  checkpoint=$scratch/tiny-qwen3-moe
  "$bin/expertmesh" checkpoint --out="$checkpoint"
fi

"$bin/expertmesh-control-plane" --checkpoint="$checkpoint" --ep_size="$num_ranks" --rank_listen=127.0.0.1:0 \
  --rank_port_file="$scratch/rank_port" --listen="$listen" --metrics_listen=127.0.0.1:0 --allow_admin &
control_plane=$!
pids+=("$control_plane")
for ((i = 0; i < 600; i++)); do
  [[ ! -s "$scratch/rank_port" ]] || break
  kill -0 "$control_plane" 2>/dev/null || { wait "$control_plane"; exit 1; }
  sleep 0.1
done
[[ -s "$scratch/rank_port" ]] || { say "the control plane did not open a port within a minute" >&2; exit 1; }
rank_port=$(cat "$scratch/rank_port")

# Each rank's keeper starts it again when it dies, and ends it when the keeper is ended.
keep() {
  local rank=$1 pid=""
  trap '[[ -z "$pid" ]] || kill -TERM "$pid" 2>/dev/null; wait; exit 0' TERM INT
  while true; do
    "$bin/expertmesh-expert-server" --control_plane="127.0.0.1:$rank_port" --ep_rank="$rank" --ep_size="$num_ranks" \
      --checkpoint="$checkpoint" --threads="$threads" &
    pid=$!
    say "rank $rank is process $pid"
    # Without the shell's own words about how it ended.
    if { wait "$pid"; } 2>/dev/null; then exit 0; fi
    say "rank $rank ended; starting it again"
    sleep 1
  done
}
threads=$(($(nproc) / num_ranks))
((threads > 0)) || threads=1
for ((rank = 0; rank < num_ranks; rank++)); do
  keep "$rank" &
  pids+=($!)
done
wait "$control_plane"
