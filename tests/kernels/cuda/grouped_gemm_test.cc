#include "kernels/cuda/grouped_gemm.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cpu/random_layer.h"
#include "tests/kernels/cuda/device_bytes.h"
#include "tests/kernels/cuda/test_device.h"

namespace expertmesh {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

int64_t Blocks(int64_t size) { return (size + kGemmScaleBlock - 1) / kGemmScaleBlock; }

std::vector<std::byte> RandomBytes(std::mt19937_64& random, int64_t count, DType dtype) {
  if (dtype != DType::kFloat8E4M3) return ToBytes(RandomValues(random, count, 1.0, dtype), dtype);
  std::vector<std::byte> bytes;
  for (const double value : RandomValues(random, count, 20.0, DType::kFloat32)) {
    bytes.push_back(std::byte{FloatToFloat8E4M3(static_cast<float>(value))});
  }
  return bytes;
}

double Load(const std::byte* data, DType dtype, int64_t index) {
  return dtype == DType::kFloat8E4M3 ? Float8E4M3ToFloat(static_cast<uint8_t>(data[index]))
                                     : LoadFloat(data, dtype, index);
}

// Multiplies by powers of two from 2^low to 2^high.
void SpreadExponents(std::mt19937_64& random, DType dtype, int low, int high,
                     std::vector<std::byte>& values) {
  std::uniform_int_distribution<int> exponent(low, high);
  const int64_t count = static_cast<int64_t>(values.size()) / DTypeBytes(dtype);
  for (int64_t i = 0; i < count; ++i) {
    const float value =
        std::ldexp(static_cast<float>(Load(values.data(), dtype, i)), exponent(random));
    if (dtype == DType::kFloat8E4M3) {
      values[static_cast<size_t>(i)] = std::byte{FloatToFloat8E4M3(value)};
    } else {
      StoreFloat(values.data(), dtype, i, value);
    }
  }
}

// All but eight values of each scale block again at the mirrored place in it, with the other sign
// where `negate`: products of two such rows cancel in pairs.
void MirrorBlocks(DType dtype, int64_t k, bool negate, std::vector<std::byte>& values) {
  const int64_t bytes = DTypeBytes(dtype);
  const int64_t num_rows = static_cast<int64_t>(values.size()) / (k * bytes);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t mirrored = i ^ (kGemmScaleBlock - 1);
      if (i % kGemmScaleBlock < 4 || mirrored <= i || mirrored >= k) continue;
      std::byte* to = values.data() + (row * k + mirrored) * bytes;
      std::copy_n(values.data() + (row * k + i) * bytes, bytes, to);
      if (negate) to[bytes - 1] ^= std::byte{0x80};
    }
  }
}

enum class Form { kContiguous, kBatched, kMasked };
// Of rows and weights: of one size; over many powers of two; and these, with sums that cancel.
enum class Values { kEven, kSpread, kCancelling };

struct GemmCase {
  DType rows_dtype = DType::kInvalid;
  DType weight_dtype = DType::kInvalid;
  DType output_dtype = DType::kFloat32;
  int64_t n = 0;
  int64_t k = 0;
  std::vector<int32_t> tokens;
  Form form = Form::kContiguous;
  std::optional<GemmTile> tile;
  bool fuse_silu_mul = false;
  bool with_bias = false;
  Values values = Values::kEven;
};

// A random product on the test device and what it should give.
class Gemm {
 public:
  Gemm(const GemmCase& c, uint64_t seed)
      : case_(c),
        max_rows_(*std::max_element(c.tokens.begin(), c.tokens.end()) + 2),
        offsets_(c.tokens.size() + 1, 0) {
    std::mt19937_64 random(seed);
    for (size_t e = 0; e < c.tokens.size(); ++e) offsets_[e + 1] = offsets_[e] + c.tokens[e];
    const int64_t num_rows =
        c.form == Form::kContiguous ? offsets_.back() : num_experts() * max_rows_;
    rows_ = RandomBytes(random, num_rows * c.k, c.rows_dtype);
    weights_ = RandomBytes(random, num_experts() * c.n * c.k, c.weight_dtype);
    if (c.values != Values::kEven) {
      SpreadExponents(random, c.rows_dtype, is_float8() ? -8 : -10, is_float8() ? 3 : 2, rows_);
      SpreadExponents(random, c.weight_dtype, is_float8() ? -8 : -14, is_float8() ? 3 : -2,
                      weights_);
    }
    if (c.values == Values::kCancelling) {
      MirrorBlocks(c.rows_dtype, c.k, false, rows_);
      MirrorBlocks(c.weight_dtype, c.k, true, weights_);
    }
    std::uniform_real_distribution<float> scale(0.01f, 0.1f);
    if (is_float8()) {
      row_scales_.resize(static_cast<size_t>(num_rows * Blocks(c.k)));
      weight_scales_.resize(static_cast<size_t>(num_experts() * Blocks(c.n) * Blocks(c.k)));
      for (float& value : row_scales_) value = scale(random);
      for (float& value : weight_scales_) value = scale(random);
    }
    num_rows_ = num_rows;
    if (c.with_bias) {
      for (const double value : RandomValues(random, num_experts() * c.n, 3.0, DType::kFloat32)) {
        bias_.push_back(static_cast<float>(value));
      }
    }
  }

  int64_t num_experts() const { return static_cast<int64_t>(case_.tokens.size()); }
  bool is_float8() const { return case_.rows_dtype == DType::kFloat8E4M3; }
  int64_t FirstRow(size_t e) const {
    return case_.form == Form::kContiguous ? offsets_[e] : static_cast<int64_t>(e) * max_rows_;
  }
  // Of the last run.
  bool uses_tensor_cores() const { return uses_tensor_cores_; }
  int64_t columns() const { return case_.fuse_silu_mul ? case_.n / 2 : case_.n; }
  int64_t row_bytes() const { return columns() * DTypeBytes(case_.output_dtype); }

  DeviceBytes Run() {
    // Rows that nobody may read are NaN.
    std::vector<std::byte> rows(rows_.size(), std::byte{0xff});
    const int64_t bytes = case_.k * DTypeBytes(case_.rows_dtype);
    for (size_t e = 0; e < case_.tokens.size(); ++e) {
      std::copy_n(rows_.begin() + FirstRow(e) * bytes, case_.tokens[e] * bytes,
                  rows.begin() + FirstRow(e) * bytes);
    }
    const DeviceBytes device_rows(rows, 0);
    const DeviceBytes device_weights(weights_, 0);
    const DeviceBytes row_scales = DeviceCopy(row_scales_);
    const DeviceBytes weight_scales = DeviceCopy(weight_scales_);
    const DeviceBytes device_tokens = DeviceCopy(case_.tokens);
    // Behind a 256-byte boundary as the header asks.
    const int64_t workspace_bytes = GroupedGemmWorkspaceBytes(static_cast<int32_t>(num_experts()));
    const DeviceBytes workspace(workspace_bytes + 256);
    CudaGroupedGemmParams params;
    params.num_experts = static_cast<int32_t>(num_experts());
    params.rows = device_rows.data();
    params.rows_dtype = case_.rows_dtype;
    params.weights = device_weights.data();
    params.weight_dtype = case_.weight_dtype;
    params.n = case_.n;
    params.k = case_.k;
    if (is_float8()) {
      params.row_scales = row_scales.As<float>();
      params.weight_scales = weight_scales.As<float>();
    }
    params.output_dtype = case_.output_dtype;
    params.tile = case_.tile;
    params.fuse_silu_mul = case_.fuse_silu_mul;
    const DeviceBytes bias = DeviceCopy(bias_);
    if (case_.with_bias) params.bias = bias.As<float>();
    uses_tensor_cores_ = GroupedGemmUsesTensorCores(params);
    const uintptr_t address = reinterpret_cast<uintptr_t>(workspace.data());
    params.workspace = workspace.data() + (256 - address % 256) % 256;
    params.workspace_bytes = workspace_bytes;
    if (case_.form != Form::kContiguous) params.max_rows_per_expert = max_rows_;
    return RunRepeatedly(num_rows_ * row_bytes(), 0, [&](std::byte* out) {
      params.output = out;
      if (case_.form == Form::kMasked) {
        params.expert_num_tokens = device_tokens.As<int32_t>();
        return LaunchMaskedGroupedGemm(params, nullptr);
      }
      // The host's arrays need not outlive the call.
      std::vector<int64_t> offsets = offsets_;
      std::vector<int32_t> tokens = case_.tokens;
      params.expert_offsets = case_.form == Form::kContiguous ? offsets.data() : nullptr;
      params.expert_num_tokens = case_.form == Form::kBatched ? tokens.data() : nullptr;
      const cudaError_t error = LaunchGroupedGemm(params, nullptr);
      std::fill(offsets.begin(), offsets.end(), -1);
      std::fill(tokens.begin(), tokens.end(), -1);
      return error;
    });
  }

  // Every `column_step`th column.
  void ExpectNearReference(const DeviceBytes& output, int64_t column_step = 1) const {
    // Without tensor cores one rounding per addition of k float32 products. Tensor cores cut off
    // what lies below the last bit of the largest addend: of a float32 where they sum 16-bit
    // products, 16 and the sum before at a time; of 13 bits behind the point where these are
    // float8, whose cuts rarely add up in sums of like addends.
    const double k = static_cast<double>(case_.k);
    double sum_bound = (k + 2) * 0x1p-24;
    if (uses_tensor_cores_) {
      if (!is_float8()) {
        sum_bound = (k + k / 16 + 4) * 0x1p-23;
      } else {
        sum_bound = case_.values == Values::kEven ? 0x1p-11 : (kGemmScaleBlock + 4) * 0x1p-13;
      }
    }
    const double unit = case_.output_dtype == DType::kFloat32   ? 0x1p-24
                        : case_.output_dtype == DType::kFloat16 ? 0x1p-11
                                                                : 0x1p-8;
    for (size_t e = 0; e < case_.tokens.size(); ++e) {
      for (int64_t row = FirstRow(e); row < FirstRow(e) + case_.tokens[e]; ++row) {
        for (int64_t column = 0; column < columns(); column += column_step) {
          Sum sum;
          if (case_.fuse_silu_mul) {
            const Sum gate = Product(e, row, GateWeightRow(column), sum_bound);
            const Sum up = Product(e, row, UpWeightRow(column), sum_bound);
            sum.exact = gate.exact / (1 + std::exp(-gate.exact)) * up.exact;
            // The slope of silu is at most 1.1; its own float32 operations.
            sum.bound = 1.1 * (gate.bound * (std::abs(up.exact) + up.bound) +
                               std::abs(gate.exact) * up.bound) +
                        std::abs(sum.exact) * 0x1p-20 + 1e-6;
          } else {
            sum = Product(e, row, column, sum_bound);
          }
          const double actual =
              LoadFloat(output.data(), case_.output_dtype, row * columns() + column);
          const double bound = sum.bound + std::abs(sum.exact) * unit + 1e-7;
          ASSERT_LE(std::abs(actual - sum.exact), bound)
              << "expert " << e << " row " << row << " column " << column << ": " << actual
              << " instead of " << sum.exact;
        }
      }
    }
  }

  // Batched rows beyond an expert's count.
  void ExpectPaddingUntouched(const DeviceBytes& output) const {
    if (case_.form == Form::kContiguous) return;
    for (size_t e = 0; e < case_.tokens.size(); ++e) {
      const int64_t first = FirstRow(e) + case_.tokens[e];
      const int64_t end = (static_cast<int64_t>(e) + 1) * max_rows_;
      EXPECT_TRUE(output.IsPoison(first * row_bytes(), (end - first) * row_bytes())) << e;
    }
  }

  // The same experts and row bytes with each expert's rows cut to the last `count` of them.
  Gemm WithLastRows(int32_t count) const {
    Gemm cut = *this;
    const int64_t bytes = case_.k * DTypeBytes(case_.rows_dtype);
    cut.rows_.clear();
    cut.row_scales_.clear();
    for (size_t e = 0; e < case_.tokens.size(); ++e) {
      const int32_t kept = std::min(count, case_.tokens[e]);
      const int64_t first = FirstRow(e) + case_.tokens[e] - kept;
      cut.case_.tokens[e] = kept;
      cut.offsets_[e + 1] = cut.offsets_[e] + kept;
      cut.rows_.insert(cut.rows_.end(), rows_.begin() + first * bytes,
                       rows_.begin() + (first + kept) * bytes);
      if (is_float8()) {
        cut.row_scales_.insert(cut.row_scales_.end(), row_scales_.begin() + first * Blocks(case_.k),
                               row_scales_.begin() + (first + kept) * Blocks(case_.k));
      }
    }
    cut.num_rows_ = cut.offsets_.back();
    return cut;
  }

  const GemmCase& gemm_case() const { return case_; }
  void set_tile(GemmTile tile) { case_.tile = tile; }

 private:
  struct Sum {
    double exact = 0;
    double bound = 0;
  };
  // Row times weight row; `sum_bound` is of the sum of magnitudes.
  Sum Product(size_t e, int64_t row, int64_t column, double sum_bound) const {
    Sum sum;
    double magnitude = 0;
    const int64_t weight_row = static_cast<int64_t>(e) * case_.n + column;
    for (int64_t i = 0; i < case_.k; ++i) {
      const double product = Load(rows_.data(), case_.rows_dtype, row * case_.k + i) *
                             Load(weights_.data(), case_.weight_dtype, weight_row * case_.k + i) *
                             Scale(e, row, column, i);
      sum.exact += product;
      magnitude += std::abs(product);
    }
    if (case_.with_bias) {
      const double bias = static_cast<double>(bias_[static_cast<size_t>(weight_row)]);
      sum.exact += bias;
      magnitude += std::abs(bias);
    }
    sum.bound = magnitude * sum_bound;
    return sum;
  }
  double Scale(size_t e, int64_t row, int64_t column, int64_t i) const {
    if (!is_float8()) return 1;
    const int64_t block = i / kGemmScaleBlock;
    const int64_t weight_block =
        (static_cast<int64_t>(e) * Blocks(case_.n) + column / kGemmScaleBlock) * Blocks(case_.k) +
        block;
    return static_cast<double>(row_scales_[static_cast<size_t>(row * Blocks(case_.k) + block)]) *
           static_cast<double>(weight_scales_[static_cast<size_t>(weight_block)]);
  }

  GemmCase case_;
  int64_t max_rows_;
  int64_t num_rows_ = 0;
  bool uses_tensor_cores_ = false;
  std::vector<int64_t> offsets_;
  std::vector<std::byte> rows_;
  std::vector<std::byte> weights_;
  std::vector<float> row_scales_;
  std::vector<float> weight_scales_;
  std::vector<float> bias_;
};

void RunAndCheck(const GemmCase& c, uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed) + " n " + std::to_string(c.n) + " k " +
               std::to_string(c.k) + " form " + std::to_string(static_cast<int>(c.form)) +
               " rows " + std::string(DTypeName(c.rows_dtype)) + " weights " +
               std::string(DTypeName(c.weight_dtype)) + " output " +
               std::string(DTypeName(c.output_dtype)));
  Gemm gemm(c, seed);
  const DeviceBytes output = gemm.Run();
  gemm.ExpectNearReference(output);
  gemm.ExpectPaddingUntouched(output);
}

TEST(GroupedGemmTest, EveryTypeAndForm) {
  uint64_t seed = 0;
  for (const Form form : {Form::kContiguous, Form::kBatched, Form::kMasked}) {
    for (const DType rows_dtype : kDTypes) {
      for (const DType weight_dtype : kDTypes) {
        for (const DType output_dtype : kDTypes) {
          ++seed;
          const int64_t n = seed % 2 == 0 ? 72 : 5;
          const int64_t k = seed % 3 == 0 ? 40 : 33;
          RunAndCheck({rows_dtype, weight_dtype, output_dtype, n, k, {3, 0, 1}, form}, seed);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(GroupedGemmTest, TileEdges) {
  uint64_t seed = 100;
  for (const int64_t n : {1, 63, 64, 65, 130}) {
    for (const int64_t k : {1, 16, 17, 129}) {
      for (const Form form : {Form::kContiguous, Form::kMasked}) {
        RunAndCheck(
            {DType::kBFloat16, DType::kBFloat16, DType::kFloat32, n, k, {0, 65, 0, 1, 64}, form},
            ++seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(GroupedGemmTest, Float8WithBlockScales) {
  uint64_t seed = 200;
  for (const int64_t n : {1, 128, 200}) {
    for (const int64_t k : {1, 127, 128, 300}) {
      for (const Form form : {Form::kContiguous, Form::kBatched, Form::kMasked}) {
        RunAndCheck({DType::kFloat8E4M3,
                     DType::kFloat8E4M3,
                     seed % 2 == 0 ? DType::kFloat32 : DType::kBFloat16,
                     n,
                     k,
                     {2, 0, 17},
                     form},
                    ++seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(GroupedGemmTest, Bias) {
  uint64_t seed = 230;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const Form form : {Form::kContiguous, Form::kBatched, Form::kMasked}) {
      GemmCase c = {dtype, dtype, DType::kFloat32, 200, 128, {3, 0, 17}, form};
      c.with_bias = true;
      RunAndCheck(c, ++seed);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(GroupedGemmTest, FusedSiluMul) {
  uint64_t seed = 250;
  for (const DType dtype : kDTypes) {
    for (const DType output_dtype : kDTypes) {
      for (const Form form : {Form::kContiguous, Form::kBatched, Form::kMasked}) {
        const int64_t n = seed % 2 == 0 ? 16 : 208;
        GemmCase c = {dtype, dtype, output_dtype, n, 40, {3, 0, 17}, form};
        c.fuse_silu_mul = true;
        c.with_bias = seed % 3 == 0;
        RunAndCheck(c, ++seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// More experts than one launch of kernel parameters holds.
TEST(GroupedGemmTest, ManyExperts) {
  std::vector<int32_t> tokens;
  for (int e = 0; e < 500; ++e) tokens.push_back(e % 5 == 0 ? 0 : 1);
  for (const Form form : {Form::kContiguous, Form::kMasked}) {
    RunAndCheck({DType::kBFloat16, DType::kBFloat16, DType::kFloat32, 3, 8, tokens, form}, 300);
  }
}

TEST(GroupedGemmTest, BytesOfARowDoNotDependOnItsNeighbours) {
  uint64_t seed = 400;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
    SCOPED_TRACE("seed " + std::to_string(++seed));
    Gemm all({dtype, dtype, DType::kFloat32, 136, 264, {70, 1, 0, 9}}, seed);
    const DeviceBytes output = all.Run();
    for (const int32_t count : {1, 8, 66}) {
      Gemm few = all.WithLastRows(count);
      const DeviceBytes few_output = few.Run();
      for (size_t e = 0; e < few.gemm_case().tokens.size(); ++e) {
        const int64_t kept = few.gemm_case().tokens[e] * few.row_bytes();
        const int64_t first =
            (all.FirstRow(e) + all.gemm_case().tokens[e]) * all.row_bytes() - kept;
        EXPECT_TRUE(std::equal(output.data() + first, output.data() + first + kept,
                               few_output.data() + few.FirstRow(e) * few.row_bytes()))
            << "expert " << e << " with " << count << " rows";
      }
    }
  }
}

// On a GPU of sm_90 each is a kernel of its own; elsewhere no tile is chosen.
std::vector<GemmTile> TilesOf(DType dtype) {
  std::vector<GemmTile> tiles = {GemmTile::kRows64, GemmTile::kRows128};
  if (dtype != DType::kFloat16) tiles.push_back(GemmTile::kRows16);
  if (dtype == DType::kBFloat16) tiles.push_back(GemmTile::kRows256);
  return tiles;
}

TEST(GroupedGemmTest, EveryTileGivesTheSameBytes) {
  uint64_t seed = 500;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    for (const Form form : {Form::kContiguous, Form::kBatched, Form::kMasked}) {
      SCOPED_TRACE("seed " + std::to_string(++seed));
      const bool is_fused = form == Form::kBatched && dtype != DType::kFloat8E4M3;
      GemmCase c = {dtype, dtype, is_fused ? dtype : DType::kFloat32, 144, 384, {0, 70, 1, 0, 9},
                    form};
      c.fuse_silu_mul = is_fused;
      std::vector<std::byte> first;
      for (const GemmTile tile : TilesOf(dtype)) {
        c.tile = tile;
        Gemm gemm(c, seed);
        const DeviceBytes output = gemm.Run();
        gemm.ExpectNearReference(output);
        gemm.ExpectPaddingUntouched(output);
        if (first.empty()) first = output.bytes();
        EXPECT_EQ(output.bytes(), first) << DTypeName(dtype) << " " << GemmTileRows(tile);
        if (!gemm.uses_tensor_cores()) break;
      }
    }
  }
}

// What a tile could add up otherwise than another: long sums of values of many sizes, and of values
// that cancel, where one bit cut off elsewhere is all of the result.
TEST(GroupedGemmTest, EveryTileGivesTheSameBytesForHardSums) {
  uint64_t seed = 600;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    for (const Values values : {Values::kEven, Values::kSpread, Values::kCancelling}) {
      for (const bool is_fused : {false, true}) {
        if (is_fused && dtype == DType::kFloat8E4M3) continue;
        for (const int64_t k : {256, 2048, 7168}) {
          SCOPED_TRACE("seed " + std::to_string(++seed) + " k " + std::to_string(k) + " values " +
                       std::to_string(static_cast<int>(values)) + (is_fused ? " fused" : ""));
          GemmCase c = {dtype, dtype, is_fused ? dtype : DType::kFloat32, 144, k, {70, 9}};
          c.fuse_silu_mul = is_fused;
          c.values = values;
          Gemm gemm(c, seed);
          std::vector<std::byte> first;
          for (const GemmTile tile : TilesOf(dtype)) {
            gemm.set_tile(tile);
            const DeviceBytes output = gemm.Run();
            if (first.empty()) {
              gemm.ExpectNearReference(output, 23);
              first = output.bytes();
            }
            EXPECT_TRUE(output.bytes() == first) << DTypeName(dtype) << " " << GemmTileRows(tile);
            if (!gemm.uses_tensor_cores()) break;
          }
          if (testing::Test::HasFatalFailure()) return;
          if (!gemm.uses_tensor_cores()) break;  // one kernel, and on a CPU a slow one
        }
      }
    }
  }
}

// Never on the tensor cores: what compute-sanitizer has the time to watch.
TEST(SimtGroupedGemmTest, TileEdgesOfMixedTypes) {
  uint64_t seed = 700;
  for (const int64_t n : {1, 65}) {
    for (const int64_t k : {1, 17}) {
      for (const Form form : {Form::kContiguous, Form::kBatched, Form::kMasked}) {
        RunAndCheck({DType::kFloat32, DType::kBFloat16, DType::kFloat32, n, k, {0, 65, 1}, form},
                    ++seed);
        RunAndCheck({DType::kFloat8E4M3, DType::kFloat8E4M3, DType::kBFloat16, n, k, {3, 0}, form},
                    ++seed);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
  GemmCase fused = {DType::kFloat32, DType::kFloat16, DType::kFloat16, 80, 33, {3, 0, 17}};
  fused.fuse_silu_mul = true;
  fused.with_bias = true;
  RunAndCheck(fused, ++seed);
}

TEST(GroupedGemmTest, MaskedCountsAreHeldToTheBatch) {
  const std::vector<int32_t> tokens = {-5, 7};
  const DeviceBytes device_tokens = DeviceCopy(tokens);
  const DeviceBytes rows = DeviceCopy(std::vector<float>{1, 2, 3, 4});
  const DeviceBytes weights = DeviceCopy(std::vector<float>{10, 100});
  const DeviceBytes workspace(GroupedGemmWorkspaceBytes(2) + 256);
  CudaGroupedGemmParams params;
  params.num_experts = 2;
  params.max_rows_per_expert = 2;
  params.expert_num_tokens = device_tokens.As<int32_t>();
  params.rows = rows.data();
  params.weights = weights.data();
  params.rows_dtype = params.weight_dtype = params.output_dtype = DType::kFloat32;
  params.n = params.k = 1;
  const uintptr_t address = reinterpret_cast<uintptr_t>(workspace.data());
  params.workspace = workspace.data() + (256 - address % 256) % 256;
  params.workspace_bytes = GroupedGemmWorkspaceBytes(2);
  const DeviceBytes output = RunRepeatedly(4 * 4, 0, [&](std::byte* out) {
    params.output = out;
    return LaunchMaskedGroupedGemm(params, nullptr);
  });
  EXPECT_TRUE(output.IsPoison(0, 8));
  EXPECT_EQ(output.As<float>()[2], 300);
  EXPECT_EQ(output.As<float>()[3], 400);
}

TEST(GroupedGemmTest, ZeroRowsLaunchNothingAndMisfitsAreRefused) {
  const int64_t launches = NumLaunches();
  const DeviceBytes memory(1024);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  const std::vector<int64_t> no_rows = {0, 0, 0};
  const std::vector<int64_t> one_row = {0, 0, 1};
  CudaGroupedGemmParams params;
  params.num_experts = 2;
  params.rows_dtype = params.weight_dtype = params.output_dtype = DType::kBFloat16;
  params.n = params.k = 8;
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorInvalidValue) << "whose rows?";
  params.expert_offsets = no_rows.data();
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaSuccess);
  EXPECT_EQ(LaunchMaskedGroupedGemm(params, nullptr), cudaErrorInvalidValue);
  params.expert_offsets = one_row.data();
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorInvalidValue) << "no memory";
  params.rows = params.weights = params.output = memory.data();
  params.workspace = memory.data() + (256 - address % 256) % 256;
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorInvalidValue) << "no workspace";
  params.workspace_bytes = GroupedGemmWorkspaceBytes(2);
  params.workspace = static_cast<std::byte*>(params.workspace) + 8;
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorMisalignedAddress);

  const auto refused = [&](auto change) {
    CudaGroupedGemmParams bad = params;
    change(bad);
    EXPECT_EQ(LaunchGroupedGemm(bad, nullptr), cudaErrorInvalidValue);
  };
  const std::vector<int64_t> descending = {0, 2, 1};
  const std::vector<int64_t> too_many = {0, 0, int64_t{1} << 31};
  const std::vector<int32_t> above_max = {0, 3};
  refused([&](auto& bad) { bad.expert_offsets = descending.data(); });
  refused([&](auto& bad) { bad.expert_offsets = too_many.data(); });
  refused([&](auto& bad) { bad.max_rows_per_expert = 2; });
  refused([&](auto& bad) {
    bad.max_rows_per_expert = 2;
    bad.expert_num_tokens = above_max.data();
  });
  refused([](auto& bad) { bad.rows_dtype = DType::kFloat8E4M3; });
  refused([](auto& bad) { bad.weight_dtype = DType::kFloat8E4M3; });
  refused([](auto& bad) { bad.rows_dtype = bad.weight_dtype = DType::kFloat8E4M3; });
  refused([](auto& bad) { bad.output_dtype = DType::kInt8; });
  refused([](auto& bad) { bad.n = 0; });
  refused([](auto& bad) { bad.k = int64_t{1} << 31; });
  refused([](auto& bad) { bad.num_experts = 0; });
  refused([](auto& bad) { bad.fuse_silu_mul = true; });
  params.rows_dtype = params.weight_dtype = DType::kFloat8E4M3;
  params.row_scales = params.weight_scales = memory.As<float>();
  params.n = 256;
  EXPECT_EQ(LaunchGroupedGemm(params, nullptr), cudaErrorMisalignedAddress);
  refused([](auto& bad) { bad.fuse_silu_mul = true; });  // its gate and up would share scales
  EXPECT_EQ(NumLaunches(), launches);
}

}  // namespace
}  // namespace expertmesh
