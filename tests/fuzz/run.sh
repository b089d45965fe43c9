#!/usr/bin/env bash
# Fuzzes the parsers of files from outside (libFuzzer, ASan, UBSan):
#   tests/fuzz/run.sh [SECONDS]        for so long in all (default 60), shared by the targets
# Exits 0 if nothing was found. A finding is left in build/fuzz/<target>/ with how to repeat it.
# What a run learns stays in build/fuzz/<target>/corpus for the next one; seeds are in tests/fuzz/seeds.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds="${1:-60}"
if ! [[ "$seconds" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: tests/fuzz/run.sh [SECONDS]; got '$seconds'" >&2
  exit 2
fi
clang="${CLANGXX:-clang++-14}"
if ! command -v "$clang" >/dev/null; then
  echo "$clang is not installed: deploy/install_deps.sh --test brings it" >&2
  exit 2
fi
command -v ccache >/dev/null && clang="ccache $clang"

declare -A sources=(
  [safetensors_header]="server/model/safetensors_header.cc server/model/stored_dtype.cc
    server/model/printable.cc"
  [model_config]="server/model/model_config.cc server/model/config_reader.cc
    server/model/architectures.cc server/model/architecture_lookup.cc server/model/model_spec.cc
    server/model/strict_json.cc server/model/printable.cc server/ops/command_line.cc
    kernels/base/dtype.cc kernels/expert_kernels.cc"
)
flags="-std=c++20 -O1 -g1 -I. -fno-omit-frame-pointer -ffp-contract=off
  -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all"
libraries="$(pkg-config --libs absl_strings absl_str_format absl_status absl_statusor \
  absl_flat_hash_map absl_flat_hash_set absl_cleanup absl_flags absl_flags_reflection absl_time)"

out=build/fuzz
mkdir -p "$out"
targets=(safetensors_header model_config)
share=$(((seconds + ${#targets[@]} - 1) / ${#targets[@]}))
for target in "${targets[@]}"; do
  objects=()
  for source in ${sources[$target]} "tests/fuzz/${target}_fuzzer.cc"; do
    object="$out/$(tr '/' '_' <<<"${source%.cc}").o"
    $clang $flags -c "$source" -o "$object"
    objects+=("$object")
  done
  $clang $flags -fsanitize=fuzzer,address,undefined "${objects[@]}" $libraries -o "$out/$target.bin"
  mkdir -p "$out/$target/corpus"
  seeds=("tests/fuzz/seeds/$target")
  if [[ "$target" == model_config ]]; then
    # The golden fixtures' own configs, as Transformers writes them.
    mkdir -p "$out/golden_configs"
    for config in tests/golden/*/config.json; do
      cp "$config" "$out/golden_configs/$(basename "$(dirname "$config")").json"
    done
    seeds+=("$out/golden_configs")
  fi
  echo "== $target: $share s"
  UBSAN_OPTIONS=print_stacktrace=1 "$out/$target.bin" -max_total_time="$share" -timeout=10 \
    -rss_limit_mb=2048 -max_len=16384 -dict="tests/fuzz/$target.dict" -print_final_stats=1 \
    -verbosity=0 -print_funcs=0 -artifact_prefix="$out/$target/" "$out/$target/corpus" "${seeds[@]}" 2>&1 |
    sed '/^###### Recommended dictionary/,/^###### End of recommended/d'
done
echo "fuzz: ok, ${#targets[@]} targets, $share s each"
