#!/usr/bin/env bash
# Installs what ExpertMesh needs to build and run, on Debian 12 and Ubuntu 24.04: Debian packages, and
# google/rpc's .proto files, which no Debian package ships; on demand what the tests and CUDA need. Does
# nothing, in well under a second, when nothing is missing.
set -euo pipefail

readonly PROTO_DIR=/usr/local/share/expertmesh/proto
readonly BIN_DIR=/usr/local/bin
# One version for both systems: it builds with Debian 12's Go 1.19 and with today's.
readonly GRPCURL=github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.1
readonly PROTOS_WHEEL=googleapis-common-protos==1.70.0
readonly PROTOS_HASHES=(b8bfcca8c25a2bb253e0e0b0adaf8c00773e5e6af6fd92397576680b807e0fd8)
readonly BUF_WHEEL=buf-bin==1.75.0
readonly BUF_HASHES=(
  6fd3ecb1694b6f5bcdfb9bef5297b330ffb9731b95445a42944c1b6158428101
  159e994efa072a7f3c84e5b90cf57f7b9a5e9f6387121bfc70e82ec7167d5694)

# nvcc, its parts, cudart and the headers: what compiles and links kernels/cuda. x86-64 alone.
readonly CUDA_DIR=/opt/expertmesh/cuda-13.0
readonly CUDA_WHEELS=(
  "nvidia-cuda-cccl==13.0.85 e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649"
  "nvidia-cuda-crt==13.0.88 2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4"
  "nvidia-cuda-nvcc==13.0.88 56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03"
  "nvidia-cuda-runtime==13.0.96 7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548"
  "nvidia-nvvm==13.0.88 c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0")

# nccl.h to compile with, and libnccl.so.2, which an expert server opens when it starts. This version is
# the one beside PyTorch 2.10 for CUDA 13; a later or earlier library works with this header.
readonly NCCL_DIR=/opt/expertmesh/nccl-2.28
readonly NCCL_WHEEL="nvidia-nccl-cu13==2.28.9 e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42"

# Headers alone, for any toolkit: the grouped GEMM's tensor core kernels.
readonly CUTLASS_DIR=/opt/expertmesh/cutlass-4.2.0
readonly CUTLASS_WHEEL=nvidia-cutlass==4.2.0.0
readonly CUTLASS_HASHES=(f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6)

packages=(
  ca-certificates python3 g++ cmake ninja-build ccache lld pkg-config
  protobuf-compiler protobuf-compiler-grpc grpc-proto
  libprotobuf-dev libgrpc++-dev libabsl-dev
  libspdlog-dev nlohmann-json3-dev prometheus-cpp-dev libcivetweb-dev libxxhash-dev)
test_packages=(
  git libgtest-dev libgmock-dev libbenchmark-dev libdnnl-dev libgloo-dev libboost-context-dev
  clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev)

usage() {
  cat <<USAGE
usage: deploy/install_deps.sh [--test] [--cuda]
  --test   also what the tests need: GoogleTest, Google Benchmark, oneDNN, clang 14 and its tools, and in
           $BIN_DIR grpcurl (built from the Go module proxy) and buf
  --cuda   also what the preset "cuda" needs: a CUDA 13 toolkit that is here already (nvcc on the PATH or in
           /usr/local/cuda) is left as it is; else NVIDIA's PyPI wheels are unpacked into $CUDA_DIR (x86-64);
           CUTLASS's headers into $CUTLASS_DIR, and NCCL into $NCCL_DIR unless /usr/include has one
USAGE
}

say() { echo "install_deps: $*"; }
die() { echo "install_deps: $*" >&2; exit 1; }

with_tests=false with_cuda=false
for argument in "$@"; do
  case "$argument" in
    --test) with_tests=true ;;
    --cuda) with_cuda=true ;;
    -h | --help) usage; exit 0 ;;
    *) echo "install_deps: unknown argument '$argument'" >&2; usage >&2; exit 2 ;;
  esac
done
if $with_tests; then
  packages+=("${test_packages[@]}")
fi

as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "must run '$*' as root, and there is no sudo"
  fi
}

# Puts the names of the packages that are not installed, of those given, into the array `missing`.
find_missing() {
  local installed
  installed=" $(dpkg-query -W -f='${db:Status-Abbrev}${Package} ' "$@" 2>/dev/null || true)"
  missing=()
  local package
  for package in "$@"; do
    [[ "$installed" == *" ii $package "* || "$installed" == *" hi $package "* ]] ||
      missing+=("$package")
  done
}

check_system() {
  local id version
  id=$(. /etc/os-release && echo "${ID:-}")
  version=$(. /etc/os-release && echo "${VERSION_ID:-}")
  case "$id $version" in
    "debian 12" | "ubuntu 24.04") ;;
    *) die "this is '$id $version'; packages are known for Debian 12 and Ubuntu 24.04 only." \
           "Missing here: ${missing[*]}" ;;
  esac
}

install_packages() {
  check_system
  say "installing ${missing[*]}"
  local update=(apt-get update -q -o DPkg::Lock::Timeout=120)
  local attempt
  # The lists' lock has no time-out of its own, so another apt-get may be in the way for a while.
  for attempt in 1 2 3 4 5 6; do
    as_root "${update[@]}" && break
    [[ $attempt == 6 ]] && die "apt-get update failed"
    sleep 10
  done
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    -o DPkg::Lock::Timeout=120 "${missing[@]}"
}

# fetch_wheel REQUIREMENT "HASH...": one wheel from PyPI into the empty $scratch/wheel, beside an empty
# $scratch/unpacked. Wheels are opened, not installed: no Python environment changes.
fetch_wheel() {
  local requirement=$1 hashes=$2
  local line="$requirement" hash
  for hash in $hashes; do line+=" --hash=sha256:$hash"; done
  rm -rf "$scratch/wheel" "$scratch/unpacked"
  mkdir "$scratch/wheel" "$scratch/unpacked"
  echo "$line" > "$scratch/requirements.txt"
  python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
    --require-hashes -r "$scratch/requirements.txt" -d "$scratch/wheel"
}

# fetch_from_wheel REQUIREMENT "HASH..." MEMBER_SUFFIX...: unpacks those members into $scratch/unpacked.
fetch_from_wheel() {
  fetch_wheel "$1" "$2"
  shift 2
  python3 - "$scratch" "$@" <<'PYTHON'
import pathlib
import sys
import zipfile

scratch, suffixes = pathlib.Path(sys.argv[1]), sys.argv[2:]
wheel = zipfile.ZipFile(next(scratch.joinpath("wheel").glob("*.whl")))
for suffix in suffixes:
    members = [name for name in wheel.namelist() if name.endswith(suffix)]
    if len(members) != 1:
        sys.exit(f"{wheel.filename} has {len(members)} files that end with {suffix}")
    wheel.extract(members[0], scratch / "unpacked")
PYTHON
}

install_google_rpc_protos() {
  say "installing google/rpc's .proto files ($PROTOS_WHEEL) into $PROTO_DIR"
  fetch_from_wheel "$PROTOS_WHEEL" "${PROTOS_HASHES[*]}" \
    google/rpc/error_details.proto google/rpc/status.proto
  # status.proto last: its presence means that the set is complete.
  local proto
  for proto in error_details status; do
    as_root install -D -m 644 "$scratch/unpacked/google/rpc/$proto.proto" \
      "$PROTO_DIR/google/rpc/$proto.proto"
  done
}

install_buf() {
  say "installing buf ($BUF_WHEEL) into $BIN_DIR"
  fetch_from_wheel "$BUF_WHEEL" "${BUF_HASHES[*]}" .data/scripts/buf
  as_root install -D -m 755 "$scratch"/unpacked/*.data/scripts/buf "$BIN_DIR/buf"
}

# Is the whole of the toolkit in CUDA_DIR, in these very versions?
cuda_is_unpacked() {
  [[ -f "$CUDA_DIR/wheels.txt" && "$(<"$CUDA_DIR/wheels.txt")" == "$(printf '%s\n' "${CUDA_WHEELS[@]}")" ]]
}

system_has_cuda() {
  local nvcc
  for nvcc in "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    [[ -x "$nvcc" ]] && "$nvcc" --version | grep -q 'release 13\.' && return 0
  done
  return 1
}

install_cuda() {
  [[ $(uname -m) == x86_64 ]] ||
    die "the CUDA wheels are for x86-64; on $(uname -m) put a CUDA 13 nvcc on the PATH and run this again"
  say "unpacking CUDA (${CUDA_WHEELS[*]%% *}) into $CUDA_DIR"
  local wheel
  mkdir "$scratch/cuda"
  for wheel in "${CUDA_WHEELS[@]}"; do
    fetch_wheel "${wheel% *}" "${wheel#* }"
    python3 -m zipfile -e "$scratch"/wheel/*.whl "$scratch/unpacked"
    cp -r "$scratch"/unpacked/nvidia/cu13/. "$scratch/cuda"
  done
  # Python's zipfile keeps no modes; nvcc looks for lib64; the linker for names without a version.
  find "$scratch/cuda/bin" "$scratch/cuda/nvvm/bin" -maxdepth 1 -type f ! -name '*.profile' -exec chmod 755 {} +
  ln -s lib "$scratch/cuda/lib64"
  ln -s libcudart.so.13 "$scratch/cuda/lib/libcudart.so"
  # Last: its presence means that the set is complete.
  printf '%s\n' "${CUDA_WHEELS[@]}" > "$scratch/cuda/wheels.txt"
  as_root rm -rf "$CUDA_DIR" "$CUDA_DIR.unfinished"
  as_root mkdir -p "${CUDA_DIR%/*}"
  as_root cp -r "$scratch/cuda" "$CUDA_DIR.unfinished"
  as_root chmod -R a+rX "$CUDA_DIR.unfinished"
  as_root mv "$CUDA_DIR.unfinished" "$CUDA_DIR"
}

install_cutlass() {
  say "unpacking CUTLASS ($CUTLASS_WHEEL) into $CUTLASS_DIR"
  fetch_wheel "$CUTLASS_WHEEL" "${CUTLASS_HASHES[*]}"
  python3 -m zipfile -e "$scratch"/wheel/*.whl "$scratch/unpacked"
  mkdir "$scratch/cutlass"
  cp -r "$scratch/unpacked/cutlass_library/source/include" "$scratch/cutlass"
  cp "$scratch"/unpacked/*.dist-info/licenses/LICENSE.txt "$scratch/cutlass"
  as_root rm -rf "$CUTLASS_DIR" "$CUTLASS_DIR.unfinished"
  as_root mkdir -p "${CUTLASS_DIR%/*}"
  as_root cp -r "$scratch/cutlass" "$CUTLASS_DIR.unfinished"
  as_root chmod -R a+rX "$CUTLASS_DIR.unfinished"
  # Its presence means that the set is complete.
  as_root mv "$CUTLASS_DIR.unfinished" "$CUTLASS_DIR"
}

nccl_is_unpacked() {
  [[ -f "$NCCL_DIR/wheels.txt" && "$(<"$NCCL_DIR/wheels.txt")" == "$NCCL_WHEEL" ]]
}

install_nccl() {
  [[ $(uname -m) == x86_64 ]] ||
    die "NCCL's wheel is for x86-64; on $(uname -m) install libnccl-dev and run this again"
  say "unpacking NCCL (${NCCL_WHEEL% *}) into $NCCL_DIR"
  fetch_from_wheel "${NCCL_WHEEL% *}" "${NCCL_WHEEL#* }" nccl/include/nccl.h nccl/lib/libnccl.so.2
  as_root rm -rf "$NCCL_DIR"
  as_root install -D -m 644 "$scratch/unpacked/nvidia/nccl/include/nccl.h" "$NCCL_DIR/include/nccl.h"
  as_root install -D -m 644 "$scratch/unpacked/nvidia/nccl/lib/libnccl.so.2" "$NCCL_DIR/lib/libnccl.so.2"
  # Last: its presence means that the set is complete.
  echo "$NCCL_WHEEL" > "$scratch/wheels.txt"
  as_root install -m 644 "$scratch/wheels.txt" "$NCCL_DIR/wheels.txt"
}

install_grpcurl() {
  say "building grpcurl ($GRPCURL) into $BIN_DIR"
  mkdir "$scratch/go"
  GOBIN="$scratch/go" GOTOOLCHAIN=local CGO_ENABLED=0 go install "$GRPCURL" ||
    die "$(go version) cannot build $GRPCURL; put a grpcurl on the PATH and run this again"
  as_root install -D -m 755 "$scratch/go/grpcurl" "$BIN_DIR/grpcurl"
}

wants_protos=false wants_buf=false wants_grpcurl=false wants_cuda=false wants_nccl=false wants_cutlass=false
[[ -f "$PROTO_DIR/google/rpc/status.proto" ]] || wants_protos=true
if $with_tests; then
  command -v buf >/dev/null || wants_buf=true
  command -v grpcurl >/dev/null || wants_grpcurl=true
fi
if $with_cuda && ! cuda_is_unpacked && ! system_has_cuda; then
  wants_cuda=true
fi
if $with_cuda && ! nccl_is_unpacked && [[ ! -f /usr/include/nccl.h ]]; then
  wants_nccl=true
fi
if $with_cuda && [[ ! -d "$CUTLASS_DIR" ]]; then
  wants_cutlass=true
fi
if $wants_protos || $wants_buf || $wants_cuda || $wants_nccl || $wants_cutlass; then
  python3 -m pip --version >/dev/null 2>&1 || packages+=(python3-pip)
fi
if $wants_grpcurl && ! command -v go >/dev/null; then
  packages+=(golang-go)
fi

find_missing "${packages[@]}"
if ((${#missing[@]})); then
  install_packages
fi
if $wants_protos || $wants_buf || $wants_grpcurl || $wants_cuda || $wants_nccl || $wants_cutlass; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  if $wants_protos; then install_google_rpc_protos; fi
  if $wants_buf; then install_buf; fi
  if $wants_grpcurl; then install_grpcurl; fi
  if $wants_cuda; then install_cuda; fi
  if $wants_nccl; then install_nccl; fi
  if $wants_cutlass; then install_cutlass; fi
fi
say "everything is there"
