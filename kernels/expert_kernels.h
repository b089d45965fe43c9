#ifndef EXPERTMESH_KERNELS_EXPERT_KERNELS_H_
#define EXPERTMESH_KERNELS_EXPERT_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "kernels/base/step_arena.h"
#include "kernels/base/stream.h"

namespace expertmesh {

enum class Activation : uint8_t {
  kSiluMul,  // silu(gate) * up; silu(x) = x / (1 + exp(-x))   (SwiGLU, arXiv:2002.05202)
  kGeluMul,  // gelu(gate) * up with the exact (erf) gelu
  // GPT-OSS: gate = min(gate, limit), up = clamp(up, -limit, limit), gate * sigmoid(alpha * gate) *
  // (up + 1)
  kClampedSwiGlu,
};

// Rows and columns of a float8 weight, and columns of a row, that share one scale.
inline constexpr int64_t kFloat8ScaleBlock = 128;

// The experts of one layer on one rank.
struct ExpertLayerShape {
  int32_t num_local_experts = 0;
  int64_t hidden_size = 0;        // H >= 1
  int64_t intermediate_size = 0;  // I >= 1; with float8 a multiple of kFloat8ScaleBlock
  // As packed: float32, float16, bfloat16, or float8_e4m3 with block scales, which not all
  // implementations take (the CPU's do not).
  DType weight_dtype = DType::kInvalid;
  Activation activation = Activation::kSiluMul;
  float swiglu_alpha = 1.702f;  // kClampedSwiGlu alone
  float swiglu_limit = 7.0f;    // kClampedSwiGlu alone
};

// One expert's weights in host memory, row-major, dtype ExpertLayerShape::weight_dtype; pointers
// may be unaligned and are not kept. Strides are in elements and let fused, transposed or
// interleaved checkpoint layouts be read in place: element (row, col) of a matrix is at data[row *
// row_stride + col * col_stride].
struct WeightMatrix {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};
struct ExpertWeights {
  WeightMatrix gate;                 // [I, H]
  WeightMatrix up;                   // [I, H]
  WeightMatrix down;                 // [H, I]
  const float* gate_bias = nullptr;  // [I] or null
  const float* up_bias = nullptr;    // [I] or null
  const float* down_bias = nullptr;  // [H] or null
  // With float8 alone, else null; not kept. Row-major without gaps, a scale for each block of 128 x
  // 128, those at the lower and right edges smaller: weight = element * scale.
  const float* gate_scales = nullptr;  // [I / 128, ceil(H / 128)]
  const float* up_scales = nullptr;    // [I / 128, ceil(H / 128)]
  const float* down_scales = nullptr;  // [ceil(H / 128), I / 128]
};

// Elements of each of the three scale arrays; 0 unless weight_dtype is float8. The shape must have
// passed CheckExpertLayerShape, and hidden_size * intermediate_size fit 64 bits.
int64_t Float8ScalesPerMatrix(const ExpertLayerShape& shape);

enum class ActivationFormat : uint8_t {
  kContiguous,  // [num_rows, hidden_size], rows sorted by local expert, expert_offsets
                // [num_local_experts + 1]
  kBatched,     // [num_local_experts, max_rows_per_expert, hidden_size], expert_num_tokens
                // [num_local_experts]
};

struct GroupedFfnParams {
  ActivationFormat format = ActivationFormat::kContiguous;
  DType activation_dtype =
      DType::kInvalid;              // of `rows`, and what the intermediate rows are rounded to
  const std::byte* rows = nullptr;  // device of the stream
  absl::Span<const int64_t> expert_offsets;  // host; kContiguous: ascending, first 0, last num_rows
  absl::Span<const int32_t> expert_num_tokens;  // host; kBatched: each in [0, max_rows_per_expert]
  int64_t max_rows_per_expert = 0;              // kBatched
  // float32, shaped as `rows`. Rows of kBatched beyond expert_num_tokens are neither read nor
  // written.
  float* output = nullptr;
  StepArena* arena = nullptr;  // for the intermediate rows; the stream's device
};

// One rank's packed weights of one layer and the grouped FFN on rows that were permuted already:
//   output[row] = down_e · act(gate_e · x, up_e · x)      for the expert e that the row belongs to
// Products in the activation dtype's matrix instruction, sums and activation in float32, rows
// between them rounded once to activation_dtype, output in float32 unrounded. A sum's K order
// depends on the weight's shape and the instruction set alone, a row's bytes never on the rows
// beside it or their number (of a GPU's tensor cores to be seen on each: cuda/grouped_gemm.h).
//
// With float8 weights rows are quantized, too, as the model was trained (DeepSeek-V3, arXiv:
// 2412.19437, section 3.3): each row by itself, in blocks of 128 columns, with a = max(max |x|,
// 1e-10) of the block
//   scale = a / 448        element = e4m3(x * (448 / a)), to nearest, ties to even
// Products of elements are summed in float32 over a block of K; block sums times both scales are
// added in float32. Activation in float32; its result is quantized like a row, straight from
// float32. That is what activation_dtype has no part in. Output in float32 unrounded. A value that
// is not finite makes its own row's output undefined, and no other row's.
class ExpertKernels {
 public:
  struct Capabilities {
    std::string instruction_set;  // "portable", "avx2", "avx512_bf16", "sm_90a"
    std::vector<DType> activation_dtypes;
    std::vector<ActivationFormat> formats;
  };

  virtual ~ExpertKernels() = default;
  virtual const Capabilities& capabilities() const = 0;
  virtual const ExpertLayerShape& shape() const = 0;
  // Bytes of packed weights on the device, all local experts together.
  virtual int64_t weight_bytes() const = 0;

  // Packs one expert. Blocking; different experts may be loaded from different threads at once;
  // every expert once, before the first GroupedFfn. INVALID_ARGUMENT for an index out of range or a
  // null matrix.
  virtual absl::Status LoadExpert(int32_t local_expert_id, const ExpertWeights& weights) = 0;

  // Enqueues the FFN. Local, not collective. One call at a time per rank. INVALID_ARGUMENT when
  // dtype, format or offsets do not fit; RESOURCE_EXHAUSTED from the arena. Zero rows are fine.
  virtual absl::Status GroupedFfn(const GroupedFfnParams& params, Stream& stream) = 0;
};

// What every implementation refuses: INVALID_ARGUMENT with the field, its value and the limit.
absl::Status CheckExpertLayerShape(const ExpertLayerShape& shape);
absl::Status CheckExpertWeights(int32_t local_expert_id, const ExpertWeights& weights,
                                const ExpertLayerShape& shape);
absl::Status CheckGroupedFfn(const GroupedFfnParams& params, const ExpertLayerShape& shape);

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_EXPERT_KERNELS_H_
