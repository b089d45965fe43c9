#ifndef EXPERTMESH_KERNELS_CPU_ISA_TABLE_PLAIN_H_
#define EXPERTMESH_KERNELS_CPU_ISA_TABLE_PLAIN_H_

#include <stdint.h>

// Loops over registers: fully unrolled, or the arrays would live in memory.
#if defined(__clang__)
#define EXPERTMESH_UNROLL _Pragma("unroll")
#else
#define EXPERTMESH_UNROLL _Pragma("GCC unroll 16")
#endif

// Plain data between the code that every CPU runs and the files compiled for one instruction set.
// Headers named
// *_plain.h are the only ones that those files include besides intrinsics: an inline std:: or
// absl:: function compiled there could win at link time and crash an older CPU. Function templates
// in them take a type of the including file's anonymous namespace, so that each instantiation stays
// in its file.

namespace expertmesh {

enum ElementType : uint8_t { kElementFloat32, kElementFloat16, kElementBFloat16 };

enum ActivationType : uint8_t {
  kActivationSiluMul,
  kActivationGeluMul,
  kActivationClampedSwiGlu,
};

// Packed weights come in panels of 32 columns: 16 gate and the same 16 up columns, or 32 columns of
// down. A panel is contiguous over the depth K. float32 and float16: [K][32]; bfloat16: [ceil(K /
// 2)][32][2], the order that the bfloat16 dot product reads. Missing columns and the odd last depth
// are zeros.
inline constexpr int kPanelColumns = 32;
inline constexpr int kPanelHalf = 16;

// Rows of one expert times a range of its panels.
struct PanelProduct {
  // [num_rows, K], float32, or bfloat16 for the bfloat16 dot product. With bfloat16 weights and an
  // odd K each row is followed by a zero.
  const void* rows;
  int64_t row_stride_bytes;
  int64_t num_rows;
  const void* weights;  // panel 0
  int64_t panel_bytes;
  int64_t depth;  // K
  int64_t first_panel;
  int64_t last_panel;  // exclusive
};

struct GateUpArgs {
  PanelProduct product;
  const float* gate_bias;  // [16 * panels] or null
  const float* up_bias;    // [16 * panels] or null
  ActivationType activation;
  float alpha;
  float limit;
  // [num_rows, 16 * panels]: values rounded to `rounding`, stored in it or widened again to
  // float32.
  void* intermediate;
  int64_t intermediate_stride_bytes;
  ElementType rounding;
  ElementType storage;
};

struct DownArgs {
  PanelProduct product;
  const float* bias;  // [32 * panels] or null
  float* output;      // [num_rows, num_columns]
  int64_t num_columns;
};

struct SumRowArgs {
  const void* rows;
  int64_t row_stride_bytes;
  ElementType rows_type;
  const int64_t* row_indices;  // [num_entries]
  const float* weights;        // [num_entries] or null
  int64_t num_entries;
  const float* addend;  // [num_columns] or null
  float addend_scale;
  int64_t num_columns;
  void* output;
  ElementType output_type;
};

struct SigmoidDotArgs {
  const void* row;
  ElementType row_type;
  const float* vector;  // [num_columns]
  int64_t num_columns;
  float* output;  // one
};

// What one instruction set offers. Pointers to functions that every thread may call.
struct IsaTable {
  // By the element type of the weights; rows are float32.
  void (*gate_up[3])(const GateUpArgs& args);
  void (*down[3])(const DownArgs& args);
  // bfloat16 rows with bfloat16 weights, or null: then the rows are widened to float32.
  void (*gate_up_bfloat16_dot)(const GateUpArgs& args);
  void (*down_bfloat16_dot)(const DownArgs& args);
  void (*widen)(const void* source, ElementType type, float* destination, int64_t count);
  // destination = round(source * factor), both of `type`.
  void (*scale)(const void* source, ElementType type, float factor, void* destination,
                int64_t count);
  // One output row, in float32 from 0 in the order of the entries, the addend last: products and
  // sums are rounded separately, so that all instruction sets give the same bytes.
  void (*sum_row)(const SumRowArgs& args);
  // The sum's order depends on num_columns alone.
  void (*sigmoid_dot)(const SigmoidDotArgs& args);
  // For the schedule alone.
  double float32_gflops;
  double bfloat16_dot_gflops;
};

extern const IsaTable kPortableIsaTable;
extern const IsaTable kAvx2IsaTable;
extern const IsaTable kAvx512Bf16IsaTable;

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CPU_ISA_TABLE_PLAIN_H_
