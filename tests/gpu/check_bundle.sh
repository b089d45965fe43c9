#!/usr/bin/env bash
# A bundle of tests/gpu/make_bundle.sh starts on a machine that has glibc and a shell, and nothing else; without a GPU
# each program says so. As root in a chroot with those alone, else in an empty directory with an empty environment.
# usage: tests/gpu/check_bundle.sh [BUNDLE.tar.gz]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bundle=$(realpath "${1:-build/expertmesh_gpu_bundle.tar.gz}")

say() { echo "check_bundle: $*"; }
die() { echo "check_bundle: $*" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tar -C "$scratch" -xzf "$bundle"

if [[ $(id -u) == 0 ]] && chroot / true 2>/dev/null; then
  say "in a chroot with glibc, sh, dirname and env"
  root=$scratch/root
  mkdir -p "$root/tmp" "$root/proc"
  mv "$scratch/expertmesh_gpu" "$root/bundle"
  for program in sh dirname env; do
    path=$(readlink -f "$(command -v "$program")")
    install -D -m 755 "$path" "$root/bin/$program"
    install -D -m 755 "$path" "$root/usr/bin/$program"
  done
  # What that machine's glibc brings, wherever a program asks for it. libselinux and the like are the shell's tools' own.
  { ldd "$root"/bin/*; ldd "$root"/bundle/libexec/*; } | grep -oE '/[^ ]*/(ld-linux[^ ]*|lib(c|m|dl|rt|pthread|resolv)\.so[^ ]*)' |
    sort -u | while read -r path; do install -D -m 755 "$(readlink -f "$path")" "$root$path"; done
  run() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" "/bundle/bin/$1" "${@:2}"; }
else
  say "in an empty directory with an empty environment"
  run() { (cd "$scratch" && env -i PATH=/usr/bin:/bin "$scratch/expertmesh_gpu/bin/$1" "${@:2}"); }
fi

# expect EXIT_CODE TEXT PROGRAM ARGUMENT...
expect() {
  local code=$1 text=$2 output rc=0
  shift 2
  output=$(run "$@" 2>&1) || rc=$?
  [[ $rc == "$code" ]] || die "'$*' ended with $rc, not $code: $output"
  [[ "$output" == *"$text"* ]] || die "'$*' does not say '$text': $output"
  say "$1: $(grep -m1 -F -- "$text" <<< "$output")"
}
expect 0 "expertmesh" expertmesh --version
expect 0 "expertmesh-control-plane" expertmesh-control-plane --version
expect 0 "expertmesh-expert-server" expertmesh-expert-server --version
expect 77 "no GPU" gpu_bench
expect 0 "no GPU" kernels_cuda_gpu_test
expect 0 "no GPU" server_comm_nccl_gpu_test
expect 0 "no GPU" server_rank_gpu_test
expect 1 "no GPU" expertmesh-expert-server --control_plane=127.0.0.1:1 --ep_rank=0 --ep_size=1 --checkpoint=/nowhere \
  --device=cuda:0
say "OK"
