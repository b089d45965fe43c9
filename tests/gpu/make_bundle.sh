#!/usr/bin/env bash
# Packs what tests/gpu/run_on_gpu.sh needs on a machine that has a GPU but none of ExpertMesh's libraries and no network:
# the programs and GPU tests of the preset "cuda", stripped, and the shared libraries that they use. Not in it: glibc
# (its loader fits that machine's NVIDIA driver), the driver, NCCL and cuBLAS (PyTorch's are used there).
# usage: tests/gpu/make_bundle.sh [--build DIR] [--out FILE] [--no_build]
#   --build DIR   configured by the preset (default build/cuda)
#   --out FILE    (default build/expertmesh_gpu_bundle.tar.gz) at most 60 MiB, compressed
#   --no_build    packs what is there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build=build/cuda out=build/expertmesh_gpu_bundle.tar.gz with_build=true
while (($#)); do
  case "$1" in
    --build | --out)
      (($# > 1)) || { echo "make_bundle: $1 has no value" >&2; exit 2; }
      declare "${1#--}=$2"
      shift
      ;;
    --no_build) with_build=false ;;
    -h | --help) sed -n '2,/^set /s/^# //p' tests/gpu/make_bundle.sh; exit 0 ;;
    *) echo "make_bundle: unknown argument '$1'" >&2; exit 2 ;;
  esac
  shift
done
readonly MAX_BYTES=$((60 << 20))
readonly PROGRAMS=(expertmesh expertmesh-control-plane expertmesh-expert-server gpu_bench
                   kernels_cuda_gpu_test server_comm_nccl_gpu_test server_rank_gpu_test)

say() { echo "make_bundle: $*"; }
die() { echo "make_bundle: $*" >&2; exit 1; }

if $with_build; then
  deploy/install_deps.sh --test --cuda
  [[ -f "$build/build.ninja" ]] || cmake --preset cuda --log-level=WARNING -B "$build" -DEXPERTMESH_BUILD_TESTS=ON
  cmake --build "$build" --target "${PROGRAMS[@]}"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
bundle=$scratch/expertmesh_gpu
mkdir -p "$bundle/bin" "$bundle/libexec" "$bundle/lib"
# Found by the programs that are run, whatever machine they are on.
cat > "$bundle/bin/start" <<'START'
#!/bin/sh
# Starts the program of this name with the bundle's libraries.
here=$(cd "$(dirname "$0")/.." && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$here/libexec/${0##*/}" "$@"
START
chmod 755 "$bundle/bin/start"
for program in "${PROGRAMS[@]}"; do
  [[ -x "$build/bin/$program" ]] || die "there is no $build/bin/$program"
  strip -o "$bundle/libexec/$program" "$build/bin/$program"
  cp "$bundle/bin/start" "$bundle/bin/$program"
done
rm "$bundle/bin/start"

# Of glibc, which every program of that machine shares.
readonly GLIBC='^(ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libnss_.*|libutil|libanl)\.so(\..*)?$'
ldd "$bundle"/libexec/* | awk '$2 == "=>" { print $1, $3 }' | sort -u | while read -r name path; do
  [[ "$path" == /* ]] || die "a program needs $name, which is not on this machine"
  [[ "$name" =~ $GLIBC ]] || install -m 755 "$path" "$bundle/lib/$name"
done
strip --strip-unneeded "$bundle"/lib/*

cp tests/gpu/run_on_gpu.sh "$bundle/run_on_gpu.sh"
chmod 755 "$bundle/run_on_gpu.sh"
# Where the package is not a clone, nobody knows.
git describe --always --dirty --abbrev=12 > "$bundle/commit" 2>/dev/null || echo unknown > "$bundle/commit"

mkdir -p "$(dirname "$out")"
tar -C "$scratch" --sort=name --owner=0 --group=0 --numeric-owner -czf "$out" expertmesh_gpu
size=$(stat -c %s "$out")
say "$out: $((size >> 20)) MiB compressed, $(du -sm "$bundle" | cut -f1) MiB unpacked, commit $(< "$bundle/commit")"
((size <= MAX_BYTES)) || die "that is more than $((MAX_BYTES >> 20)) MiB"
