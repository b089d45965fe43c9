#include <math.h>
#include <stdint.h>

#include "kernels/base/dtype.h"
#include "kernels/cpu/isa_table_plain.h"
#include "kernels/cpu/panel_product_plain.h"
#include "kernels/cpu/row_loops_plain.h"

namespace expertmesh {
namespace {

constexpr int kLanes = kPanelHalf;

// Loops that the compiler turns into whatever vectors the baseline has. Products and sums are
// rounded separately: fused multiply-add is a library call without the instruction.
struct Portable {
  struct Vec {
    float v[kLanes];
  };

  static constexpr int kTileRows = 1;
  static constexpr int kTilePanels = 1;
  static constexpr int kStreamRows = 1;
  static constexpr int kStreamPanels = 1;

  template <class Operation>
  static Vec Each(Operation operation) {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = operation(i);
    return result;
  }
  static Vec Set(float x) {
    return Each([x](int) { return x; });
  }
  static Vec Add(const Vec& a, const Vec& b) {
    return Each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static Vec Sub(const Vec& a, const Vec& b) {
    return Each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static Vec Mul(const Vec& a, const Vec& b) {
    return Each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static Vec Div(const Vec& a, const Vec& b) {
    return Each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static Vec MulAdd(const Vec& a, const Vec& b, const Vec& c) {
    return Each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static Vec Min(const Vec& a, const Vec& b) {
    return Each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Vec Max(const Vec& a, const Vec& b) {
    return Each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Vec RoundToInteger(const Vec& a) {
    return Each([&](int i) { return nearbyintf(a.v[i]); });
  }
  static Vec ScaleByPowerOfTwo(const Vec& a, const Vec& n) {
    return Each([&](int i) {
      if (!(n.v[i] >= -200.0f && n.v[i] <= 200.0f)) return a.v[i];  // NaN
      return ldexpf(a.v[i], static_cast<int>(n.v[i]));
    });
  }

  static Vec Broadcast(const char* p) {
    float x;
    __builtin_memcpy(&x, p, sizeof(x));
    return Set(x);
  }
  static Vec LoadFloat32(const void* p) {
    Vec result;
    __builtin_memcpy(&result, p, sizeof(result));
    return result;
  }
  static Vec LoadFloat16(const void* p) { return Load(p, kElementFloat16, kLanes); }
  static Vec LoadEvenBFloat16(const void* p) { return LoadBFloat16Pairs(p, 16, 0); }
  static Vec LoadOddBFloat16(const void* p) { return LoadBFloat16Pairs(p, 0, 0xffff0000u); }

  static Vec LoadBFloat16Pairs(const void* p, int shift, uint32_t mask) {
    uint32_t pairs[kLanes];
    __builtin_memcpy(pairs, p, sizeof(pairs));
    for (uint32_t& pair : pairs) pair = mask != 0 ? pair & mask : pair << shift;
    Vec result;
    __builtin_memcpy(&result, pairs, sizeof(result));
    return result;
  }

  static DType TypeOf(ElementType type) {
    if (type == kElementFloat32) return DType::kFloat32;
    return type == kElementFloat16 ? DType::kFloat16 : DType::kBFloat16;
  }
  static Vec Load(const void* p, ElementType type, int count) {
    const DType dtype = TypeOf(type);
    return Each([&](int i) { return i < count ? LoadFloat(p, dtype, i) : 0.0f; });
  }
  static void Store(void* p, ElementType type, const Vec& a, int count) {
    const DType dtype = TypeOf(type);
    for (int i = 0; i < count; ++i) StoreFloat(p, dtype, i, a.v[i]);
  }
  static Vec RoundTo(const Vec& a, ElementType type) {
    char stored[sizeof(Vec)];
    Store(stored, type, a, kLanes);
    return Load(stored, type, kLanes);
  }
};

}  // namespace

extern const IsaTable kPortableIsaTable = {
    /*gate_up=*/{GateUp<Portable, MultiplyFloat32<Portable>>,
                 GateUp<Portable, MultiplyFloat16<Portable>>,
                 GateUp<Portable, MultiplyBFloat16<Portable>>},
    /*down=*/
    {Down<Portable, MultiplyFloat32<Portable>>, Down<Portable, MultiplyFloat16<Portable>>,
     Down<Portable, MultiplyBFloat16<Portable>>},
    /*gate_up_bfloat16_dot=*/nullptr,
    /*down_bfloat16_dot=*/nullptr,
    /*widen=*/Widen<Portable>,
    /*scale=*/Scale<Portable>,
    /*sum_row=*/SumRow<Portable>,
    /*sigmoid_dot=*/SigmoidDot<Portable>,
    /*float32_gflops=*/10,
    /*bfloat16_dot_gflops=*/10,
};

}  // namespace expertmesh
