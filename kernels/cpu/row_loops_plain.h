#ifndef EXPERTMESH_KERNELS_CPU_ROW_LOOPS_PLAIN_H_
#define EXPERTMESH_KERNELS_CPU_ROW_LOOPS_PLAIN_H_

#include "kernels/cpu/activation_plain.h"
#include "kernels/cpu/isa_table_plain.h"

namespace expertmesh {

// V as in activation_plain.h. Pointers may be unaligned.

template <class V>
constexpr int64_t ElementBytes(ElementType type) {
  return type == kElementFloat32 ? 4 : 2;
}

template <class V>
void Widen(const void* source, ElementType type, float* destination, int64_t count) {
  const char* in = static_cast<const char*>(source);
  for (int64_t i = 0; i < count; i += kPanelHalf) {
    const int n = static_cast<int>(count - i < kPanelHalf ? count - i : kPanelHalf);
    V::Store(destination + i, kElementFloat32, V::Load(in + i * ElementBytes<V>(type), type, n), n);
  }
}

template <class V>
void Scale(const void* source, ElementType type, float factor, void* destination, int64_t count) {
  const char* in = static_cast<const char*>(source);
  char* out = static_cast<char*>(destination);
  const typename V::Vec factors = V::Set(factor);
  for (int64_t i = 0; i < count; i += kPanelHalf) {
    const int n = static_cast<int>(count - i < kPanelHalf ? count - i : kPanelHalf);
    const int64_t offset = i * ElementBytes<V>(type);
    V::Store(out + offset, type, V::Mul(V::Load(in + offset, type, n), factors), n);
  }
}

// Columns [column, column + 16 * kVecs); only the last of them may be partial, with `tail`
// elements.
template <class V, int kVecs>
void SumColumns(const SumRowArgs& args, int64_t column, int tail) {
  const int64_t in_bytes = ElementBytes<V>(args.rows_type);
  const char* in = static_cast<const char*>(args.rows) + column * in_bytes;
  typename V::Vec sum[kVecs];
  EXPERTMESH_UNROLL
  for (int v = 0; v < kVecs; ++v) sum[v] = V::Set(0.0f);
  for (int64_t j = 0; j < args.num_entries; ++j) {
    const char* row = in + args.row_indices[j] * args.row_stride_bytes;
    const typename V::Vec weight = V::Set(args.weights != nullptr ? args.weights[j] : 1.0f);
    EXPERTMESH_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const int n = v + 1 == kVecs ? tail : kPanelHalf;
      const typename V::Vec x = V::Load(row + v * kPanelHalf * in_bytes, args.rows_type, n);
      sum[v] = V::Add(sum[v], V::Mul(weight, x));
    }
  }
  if (args.addend != nullptr) {
    const typename V::Vec scale = V::Set(args.addend_scale);
    EXPERTMESH_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      const int n = v + 1 == kVecs ? tail : kPanelHalf;
      const typename V::Vec x = V::Load(args.addend + column + v * kPanelHalf, kElementFloat32, n);
      sum[v] = V::Add(sum[v], V::Mul(scale, x));
    }
  }
  const int64_t out_bytes = ElementBytes<V>(args.output_type);
  char* out = static_cast<char*>(args.output) + column * out_bytes;
  EXPERTMESH_UNROLL
  for (int v = 0; v < kVecs; ++v) {
    const int n = v + 1 == kVecs ? tail : kPanelHalf;
    V::Store(out + v * kPanelHalf * out_bytes, args.output_type, sum[v], n);
  }
}

template <class V>
void SumRow(const SumRowArgs& args) {
  constexpr int kWide = 8;
  int64_t column = 0;
  for (; column + kWide * kPanelHalf <= args.num_columns; column += kWide * kPanelHalf) {
    SumColumns<V, kWide>(args, column, kPanelHalf);
  }
  for (; column < args.num_columns; column += kPanelHalf) {
    const int64_t rest = args.num_columns - column;
    SumColumns<V, 1>(args, column, static_cast<int>(rest < kPanelHalf ? rest : kPanelHalf));
  }
}

template <class V>
void SigmoidDot(const SigmoidDotArgs& args) {
  const int64_t row_bytes = ElementBytes<V>(args.row_type);
  const char* row = static_cast<const char*>(args.row);
  typename V::Vec lanes = V::Set(0.0f);
  for (int64_t i = 0; i < args.num_columns; i += kPanelHalf) {
    const int64_t rest = args.num_columns - i;
    const int n = static_cast<int>(rest < kPanelHalf ? rest : kPanelHalf);
    lanes = V::MulAdd(V::Load(row + i * row_bytes, args.row_type, n),
                      V::Load(args.vector + i, kElementFloat32, n), lanes);
  }
  float parts[kPanelHalf];
  V::Store(parts, kElementFloat32, lanes, kPanelHalf);
  float sum = 0.0f;
  for (int i = 0; i < kPanelHalf; ++i) sum += parts[i];
  const typename V::Vec e = Exp<V>(V::Set(-sum));
  V::Store(args.output, kElementFloat32, V::Div(V::Set(1.0f), V::Add(V::Set(1.0f), e)), 1);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CPU_ROW_LOOPS_PLAIN_H_
