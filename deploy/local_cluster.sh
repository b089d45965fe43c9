#!/usr/bin/env bash
# A control plane and N expert servers, each a process of its own, on loopback, until Ctrl-C.
# usage: deploy/local_cluster.sh N [--checkpoint DIR] [--listen HOST:PORT] [--bin DIR] [-- FLAGS]
#   N                    ranks, 1 to 64
#   --checkpoint DIR     Hugging Face checkpoint (default: a small synthetic one, written anew)
#   --listen HOST:PORT   where clients call (default 127.0.0.1:50051; port 0: the system chooses)
#   --bin DIR            programs that are built already (default: installs what is missing and builds them)
#   -- FLAGS             passed to expertmesh-control-plane, e.g. -- --dispatch=direct --heartbeat_timeout=2s
# Metrics are on a free port, which the control plane's log names, unless -- --metrics_listen=HOST:PORT chooses one.
# A rank that ends, however it ends (kill -9, SIGTERM, a crash), is started again after a second.
# Ctrl-C or SIGTERM stops all: the control plane first, which ends the calls that it has taken, then the ranks; a second
# one ends that wait. When the control plane ends by itself, so does all of it. Exit codes: 0 stopped as asked, 1 failed,
# 2 wrong arguments.
set -euo pipefail
script=${BASH_SOURCE[0]}
caller=$PWD
cd "$(dirname "$script")/.."

usage() { sed -n '2,/^set /s/^# //p' deploy/local_cluster.sh; }
say() { echo "local_cluster | $*" || true; }
die() { echo "local_cluster: $*" >&2; exit 1; }
usage_error() {
  echo "local_cluster: $*" >&2
  usage >&2
  exit 2
}

num_ranks="" checkpoint="" listen=127.0.0.1:50051 bin="" control_flags=()
while (($#)); do
  name=${1%%=*}
  case "$1" in
    --checkpoint=* | --listen=* | --bin=*) value=${1#*=} ;;
    --checkpoint | --listen | --bin)
      (($# > 1)) || usage_error "$name has no value"
      value=$2
      shift
      ;;
    --) shift; control_flags=("$@"); break ;;
    -h | --help) usage; exit 0 ;;
    -*) usage_error "there is no option '$name'" ;;
    *)
      [[ "$1" =~ ^[1-9][0-9]?$ ]] && (($1 <= 64)) || usage_error "'$1' is no number of ranks: 1 to 64"
      [[ -z "$num_ranks" ]] || usage_error "two numbers of ranks: $num_ranks and $1"
      num_ranks=$1 name="" value=""
      ;;
  esac
  case "$name" in
    --checkpoint) [[ -n "$value" ]] || usage_error "--checkpoint is empty; it takes a folder"; checkpoint=$value ;;
    --listen) [[ "$value" =~ ^.+:[0-9]+$ ]] || usage_error "--listen is '$value'; it takes HOST:PORT"; listen=$value ;;
    --bin) [[ -n "$value" ]] || usage_error "--bin is empty; it takes a folder"; bin=$value ;;
  esac
  shift
done
[[ -n "$num_ranks" ]] || usage_error "how many ranks?"
# Paths are the caller's.
[[ -z "$checkpoint" || "$checkpoint" == /* ]] || checkpoint=$caller/$checkpoint
[[ -z "$bin" || "$bin" == /* ]] || bin=$caller/$bin
[[ -z "$checkpoint" || -f "$checkpoint/config.json" ]] || die "--checkpoint: there is no $checkpoint/config.json"

if [[ -z "$bin" ]]; then
  deploy/install_deps.sh
  cmake -S . -B build/quickstart -G Ninja -DCMAKE_BUILD_TYPE=Release -DEXPERTMESH_BUILD_TESTS=OFF --log-level=WARNING
  cmake --build build/quickstart --target expertmesh expertmesh-control-plane expertmesh-expert-server
  bin=$PWD/build/quickstart/bin
fi
for program in expertmesh expertmesh-control-plane expertmesh-expert-server; do
  [[ -x "$bin/$program" ]] || die "--bin: there is no program $bin/$program"
done

scratch=$(mktemp -d)
control_plane="" keepers=() mouths=() announcer="" life=""
# What a further signal while stopping goes to.
stopping=() at_once=false

is_alive() { kill -0 "$1" 2>/dev/null; }
# Until they have ended; signals that the script handles meanwhile do not end the wait. Without the shell's own words
# about how they ended.
wait_for_end() {
  local pid
  for pid in "$@"; do
    { wait "$pid" || true; } 2>/dev/null
    while is_alive "$pid"; do { wait "$pid" || true; } 2>/dev/null; done
  done
}
# Processes that were stopped (SIGSTOP) go on to hear of it.
ask_to_end() {
  kill -TERM "$@" 2>/dev/null || true
  kill -CONT "$@" 2>/dev/null || true
}
stop() {
  stopping=("$@")
  ask_to_end "$@"
  ! $at_once || ask_to_end "$@"
  wait_for_end "$@"
}
# Not what comes twice of one wish: timeout(1) signals this process and then its group. Servers ignore repeats for a
# second, too.
stop_at_once() {
  ((${EPOCHREALTIME/[.,]/} - stopping_since > 1200000)) || return 0
  at_once=true
  say "at once"
  ask_to_end "${stopping[@]}"
}
finish() {
  local code=$?
  trap - EXIT
  stopping_since=${EPOCHREALTIME/[.,]/}
  trap stop_at_once INT TERM HUP
  [[ -z "$announcer" ]] || kill -TERM "$announcer" 2>/dev/null || true
  if [[ -n "$control_plane" ]] && is_alive "$control_plane"; then
    say "stopping: calls that were taken end first (Ctrl-C again: at once)"
    stop "$control_plane"
  fi
  ((${#keepers[@]} == 0)) || stop "${keepers[@]}"
  [[ -z "$life" ]] || echo done >&"$life"
  # Their last words come before the prompt.
  local mouth
  for mouth in "${mouths[@]}"; do exec {mouth}>&-; done
  wait || true
  rm -rf "$scratch"
  exit "$code"
}
trap finish EXIT
trap 'exit 0' INT TERM HUP

# mouth NAME: puts a descriptor into `mouth`; what is written there appears line by line behind NAME.
mouth() {
  local name
  printf -v name '%-13s' "$1"
  exec {mouth}> >(exec setsid sed -u "s/^/$name | /")
  mouths+=("$mouth")
}
how_it_ended() {
  if (($1 > 128)); then echo "ended by SIG$(kill -l "$1")"; else echo "ended with exit code $1"; fi
}

if [[ -z "$checkpoint" ]]; then
  checkpoint=$scratch/tiny-qwen3-moe
  "$bin/expertmesh" checkpoint --out="$checkpoint"
fi

# Servers have sessions of their own (setsid), so that Ctrl-C reaches this script alone, which then stops them in order.
mouth control-plane
setsid "$bin/expertmesh-control-plane" --checkpoint="$checkpoint" --ep_size="$num_ranks" --rank_listen=127.0.0.1:0 \
  --rank_port_file="$scratch/rank_port" --listen="$listen" --port_file="$scratch/port" --metrics_listen=127.0.0.1:0 \
  --allow_admin "${control_flags[@]}" >&"$mouth" 2>&1 &
control_plane=$!
say "the control plane is pid $control_plane"
for ((i = 0; i < 600; i++)); do
  [[ ! -s "$scratch/rank_port" || ! -s "$scratch/port" ]] || break
  if ! is_alive "$control_plane"; then
    code=0
    wait "$control_plane" || code=$?
    say "the control plane $(how_it_ended "$code"); it says above why"
    exit 1
  fi
  sleep 0.1
done
[[ -s "$scratch/rank_port" && -s "$scratch/port" ]] || die "the control plane did not open its ports within a minute"
rank_port=$(<"$scratch/rank_port")
target=${listen%:*}:$(<"$scratch/port")

# Each rank's keeper starts it again when it ends, until the keeper is told to stop; then it ends it, at once when it is
# told so again.
stop_rank() {
  if [[ -z "$pid" ]]; then
    is_stopping=true
  elif $is_stopping; then
    kill -KILL "$pid" 2>/dev/null || true
  else
    is_stopping=true
    ask_to_end "$pid"
  fi
}
keep() {
  local rank=$1 mouth=$2 pid="" is_stopping=false code
  trap - EXIT
  trap 'stop_rank' TERM
  trap '' INT HUP TTOU
  until $is_stopping; do
    setsid "$bin/expertmesh-expert-server" --control_plane="127.0.0.1:$rank_port" --ep_rank="$rank" \
      --ep_size="$num_ranks" --checkpoint="$checkpoint" --threads="$threads" >&"$mouth" 2>&1 &
    pid=$!
    echo "$pid" > "$scratch/rank_$rank"
    say "rank $rank is pid $pid"
    ! $is_stopping || ask_to_end "$pid"
    while true; do
      code=0
      { wait "$pid" || code=$?; } 2>/dev/null
      is_alive "$pid" || break
    done
    $is_stopping && break
    say "rank $rank (pid $pid) $(how_it_ended "$code"); it is started again in a second"
    pid=""
    sleep 1 &
    wait "$!" || true
  done
}
threads=$(($(nproc) / num_ranks))
((threads > 0)) || threads=1
for ((rank = 0; rank < num_ranks; rank++)); do
  mouth "rank $rank"
  # In a process group of its own, for what signals this script's whole group (Ctrl-C, timeout).
  set -m
  keep "$rank" "$mouth" < /dev/null &
  set +m
  keepers+=("$!")
done

# Ends it all when this script is killed: the only writer of its pipe is gone then.
outlive() {
  trap - EXIT
  trap '' INT TERM HUP
  local word
  read -r word || {
    kill -TERM "$control_plane" "${keepers[@]}" 2>/dev/null
    rm -rf "$scratch"
  }
}
exec {life}> >(outlive)

# Says what there is, once there is all of it.
announce() {
  trap - EXIT INT TERM HUP
  local text num_polls
  for ((num_polls = 1; ; num_polls++)); do
    text=$("$bin/expertmesh" status --target="$target" --timeout=5s 2>/dev/null | head -n 1) || true
    [[ "$text" != *": ready" ]] || break
    is_alive "$control_plane" || exit 0
    # A large checkpoint takes a while.
    ((num_polls % 25)) || say "$text"
    sleep 0.2
  done
  local rank pids=() cli=${bin#"$PWD/"}/expertmesh to=""
  [[ "$target" == 127.0.0.1:50051 ]] || to=" --target=$target"
  for ((rank = 0; rank < num_ranks; rank++)); do pids+=("$(<"$scratch/rank_$rank")"); done
  say "ready: clients call $target; pids: control plane $control_plane, ranks from 0 on ${pids[*]}"
  say "metrics: the control plane says above where (-- --metrics_listen=127.0.0.1:9464 chooses)"
  say "in another terminal:"
  say "  $cli status --watch=1s$to"
  say "  $cli forward --tokens=16 --check=$checkpoint$to"
  say "  $cli bench --duration=30s$to"
  say "  kill -9 ${pids[-1]}     # the rank comes back; calls wait for it"
  say "Ctrl-C stops everything"
}
announce {life}>&- &
announcer=$!

code=0
{ wait "$control_plane" || code=$?; } 2>/dev/null
say "the control plane $(how_it_ended "$code"); stopping the ranks"
((code == 0)) || exit 1
