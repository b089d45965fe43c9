#!/usr/bin/env bash
# Installs what is missing, builds everything and runs every test.
# usage: tests/run.sh [--release|--asan|--tsan|--cuda|--cuda-parts|--cuda-asan] [-R REGEX]
#   --release   (default) also checks the formatting and the protos, without -R
#   --asan      AddressSanitizer, LeakSanitizer and UBSan
#   --tsan      ThreadSanitizer
#   --cuda      the release build with the CUDA kernels, compiled for a GPU and tested on the CPU
#   --cuda-parts of --cuda what the release build has not: the programs with CUDA and the tests of what is CUDA's
#   --cuda-asan kernels, ranks and communicator of a GPU on the CPU under AddressSanitizer; needs no nvcc
#   -R REGEX    only the ctest tests whose names match, and only what they need is built
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=release
dependencies=(--test)
targets=()
filter=()
regex=
while (($#)); do
  case "$1" in
    --release | --asan | --tsan) preset=${1#--} ;;
    --cuda) preset=cuda dependencies=(--test --cuda) ;;
    --cuda-asan)
      preset=cuda-asan dependencies=(--test --cuda)
      targets=(kernels_cuda_test kernels_cuda_host_test kernels_cuda_rank_test server_comm_nccl_cuda_test
               server_rank_cuda_test)
      filter=(-R "^($(IFS='|'; echo "${targets[*]}"))\$")
      targets=(--target "${targets[@]}")
      ;;
    --cuda-parts)
      preset=cuda dependencies=(--test --cuda)
      targets=(--target cuda_parts) filter=(-L cuda)
      ;;
    -R)
      [[ -n ${2-} ]] || { echo "run.sh: -R has no value; it takes a regular expression" >&2; exit 2; }
      regex=$2
      shift
      ;;
    -h | --help) sed -n '2,/^set /s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run.sh: unknown argument '$1'" >&2; sed -n '2,/^set /s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
  esac
  shift
done

jobs=$(nproc)
phase() {
  local name=$1 start=$SECONDS
  shift
  echo "== $preset: $name"
  "$@" || { echo "== $preset: $name FAILED after $((SECONDS - start)) s" >&2; exit 1; }
  echo "== $preset: $name took $((SECONDS - start)) s"
}

check_format() {
  git ls-files --cached --others --exclude-standard -z -- '*.h' '*.cc' '*.cu' '*.cuh' |
    xargs -0 -r -n 16 -P "$jobs" clang-format-14 --dry-run -Werror
}

# buf lints a descriptor set, so that it needs neither a registry nor copies of google/rpc.
check_protos() {
  local image=build/expertmesh_protos.binpb
  mkdir -p build &&
    protoc -Iproto -I/usr/local/share/expertmesh/proto --include_imports --include_source_info \
    -o "$image" $(cd proto && ls expertmesh/v1/*.proto) &&
    buf lint "$image" --config proto/buf.yaml
}

# The names of tests are those of their targets. Before they are built ctest complains of each at length.
choose_tests() {
  local names=()
  mapfile -t names < <(ctest --preset "$preset" -N -R "$regex" 2> /dev/null | sed -n 's/^ *Test *#[0-9]*: //p')
  if ((${#names[@]} == 0)); then
    echo "run.sh: of $preset no test's name matches '$regex'; all names: ctest --preset $preset -N 2> /dev/null" >&2
    return 1
  fi
  targets=(--target "${names[@]}")
  filter=(-R "$regex")
}

phase install deploy/install_deps.sh "${dependencies[@]}"
if [[ $preset == release && -z $regex ]]; then
  phase format check_format
  phase protos check_protos
fi
# Said, for the quickstart turns tests off in the same folder.
phase configure cmake --preset "$preset" --log-level=WARNING -DEXPERTMESH_BUILD_TESTS=ON
[[ -z $regex ]] || phase choose choose_tests
phase build cmake --build --preset "$preset" "${targets[@]}"
phase test ctest --preset "$preset" --parallel 2 "${filter[@]}"
