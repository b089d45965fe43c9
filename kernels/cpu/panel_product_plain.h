#ifndef EXPERTMESH_KERNELS_CPU_PANEL_PRODUCT_PLAIN_H_
#define EXPERTMESH_KERNELS_CPU_PANEL_PRODUCT_PLAIN_H_

#include "kernels/cpu/activation_plain.h"
#include "kernels/cpu/isa_table_plain.h"

namespace expertmesh {

// How one step over the depth multiplies: what a row and a panel give it. Every column of every row
// has one accumulator that runs over the whole depth in order, so a row's bytes depend on nothing
// but the row and the weights.
//
// kSubSteps products follow one another in a step, each adding to the accumulators.

template <class V>
struct MultiplyFloat32 {
  static constexpr int kDepthPerStep = 1;
  static constexpr int kSubSteps = 1;
  static constexpr int kHalfBytes = kPanelHalf * 4;
  static constexpr int kRowStepBytes = 4;
  static typename V::Vec Weights(const char* half, int /*sub*/) { return V::LoadFloat32(half); }
  static typename V::Vec Row(const char* row, int /*sub*/) { return V::Broadcast(row); }
  static typename V::Vec Add(typename V::Vec sum, typename V::Vec row, typename V::Vec weights) {
    return V::MulAdd(row, weights, sum);
  }
};

template <class V>
struct MultiplyFloat16 {
  static constexpr int kDepthPerStep = 1;
  static constexpr int kSubSteps = 1;
  static constexpr int kHalfBytes = kPanelHalf * 2;
  static constexpr int kRowStepBytes = 4;
  static typename V::Vec Weights(const char* half, int /*sub*/) { return V::LoadFloat16(half); }
  static typename V::Vec Row(const char* row, int /*sub*/) { return V::Broadcast(row); }
  static typename V::Vec Add(typename V::Vec sum, typename V::Vec row, typename V::Vec weights) {
    return V::MulAdd(row, weights, sum);
  }
};

// Pairs of bfloat16 weights, widened in the register: the even depth, then the odd one.
template <class V>
struct MultiplyBFloat16 {
  static constexpr int kDepthPerStep = 2;
  static constexpr int kSubSteps = 2;
  static constexpr int kHalfBytes = kPanelHalf * 4;
  static constexpr int kRowStepBytes = 8;
  static typename V::Vec Weights(const char* half, int sub) {
    return sub == 0 ? V::LoadEvenBFloat16(half) : V::LoadOddBFloat16(half);
  }
  static typename V::Vec Row(const char* row, int sub) { return V::Broadcast(row + 4 * sub); }
  static typename V::Vec Add(typename V::Vec sum, typename V::Vec row, typename V::Vec weights) {
    return V::MulAdd(row, weights, sum);
  }
};

// bfloat16 rows and weights in the dot product instruction.
template <class V>
struct DotBFloat16 {
  static constexpr int kDepthPerStep = 2;
  static constexpr int kSubSteps = 1;
  static constexpr int kHalfBytes = kPanelHalf * 4;
  static constexpr int kRowStepBytes = 4;
  static typename V::Pairs Weights(const char* half, int /*sub*/) { return V::LoadPairs(half); }
  static typename V::Pairs Row(const char* row, int /*sub*/) { return V::BroadcastPair(row); }
  static typename V::Vec Add(typename V::Vec sum, typename V::Pairs row,
                             typename V::Pairs weights) {
    return V::DotAdd(sum, row, weights);
  }
};

inline constexpr int kCacheLineBytes = 64;

template <class V, class Multiply>
inline int64_t NumSteps(const PanelProduct& product) {
  return (product.depth + Multiply::kDepthPerStep - 1) / Multiply::kDepthPerStep;
}

// Both halves of one panel's sums for one row.
template <class V>
struct Sums {
  typename V::Vec low, high;
};

// What to bring into the second-level cache while a tile is computed.
struct Prefetch {
  const char* data = nullptr;
  int64_t bytes_per_step = 0;
};

// Rows [first_row, first_row + kRows) times kPanels panels: sums[r * kPanels + p]. kPrefetch cache
// lines are asked for in every step.
template <class V, class Multiply, int kRows, int kPanels, int kPrefetch>
[[gnu::noinline]] void MultiplyTile(const PanelProduct& product, int64_t first_row,
                                    const int64_t* panel_indices, const Prefetch& prefetch,
                                    Sums<V>* sums) {
  const char* row[kRows];
  EXPERTMESH_UNROLL
  for (int r = 0; r < kRows; ++r) {
    row[r] = static_cast<const char*>(product.rows) + (first_row + r) * product.row_stride_bytes;
  }
  const char* panel[kPanels];
  EXPERTMESH_UNROLL
  for (int p = 0; p < kPanels; ++p) {
    panel[p] = static_cast<const char*>(product.weights) + panel_indices[p] * product.panel_bytes;
  }
  typename V::Vec sum[kRows][kPanels][2];
  EXPERTMESH_UNROLL
  for (int r = 0; r < kRows; ++r) {
    EXPERTMESH_UNROLL
    for (int p = 0; p < kPanels; ++p) sum[r][p][0] = sum[r][p][1] = V::Set(0.0f);
  }

  const int64_t num_steps = NumSteps<V, Multiply>(product);
  for (int64_t step = 0; step < num_steps; ++step) {
    EXPERTMESH_UNROLL
    for (int line = 0; line < kPrefetch; ++line) {
      __builtin_prefetch(prefetch.data + step * prefetch.bytes_per_step + line * kCacheLineBytes, 0,
                         2);
    }
    EXPERTMESH_UNROLL
    for (int sub = 0; sub < Multiply::kSubSteps; ++sub) {
      decltype(Multiply::Weights(panel[0], 0)) weights[kPanels][2];
      EXPERTMESH_UNROLL
      for (int p = 0; p < kPanels; ++p) {
        const char* half = panel[p] + step * (2 * Multiply::kHalfBytes);
        weights[p][0] = Multiply::Weights(half, sub);
        weights[p][1] = Multiply::Weights(half + Multiply::kHalfBytes, sub);
      }
      EXPERTMESH_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto x = Multiply::Row(row[r] + step * Multiply::kRowStepBytes, sub);
        EXPERTMESH_UNROLL
        for (int p = 0; p < kPanels; ++p) {
          sum[r][p][0] = Multiply::Add(sum[r][p][0], x, weights[p][0]);
          sum[r][p][1] = Multiply::Add(sum[r][p][1], x, weights[p][1]);
        }
      }
    }
  }
  EXPERTMESH_UNROLL
  for (int r = 0; r < kRows; ++r) {
    EXPERTMESH_UNROLL
    for (int p = 0; p < kPanels; ++p) sums[r * kPanels + p] = {sum[r][p][0], sum[r][p][1]};
  }
}

// MultiplyTile for a number of rows known at run time, 1 to kMaxRows.
template <class V, class Multiply, int kMaxRows, int kPanels, int kPrefetch>
inline void MultiplyRows(const PanelProduct& product, int64_t first_row, int64_t num_rows,
                         const int64_t* panel_indices, const Prefetch& prefetch, Sums<V>* sums) {
  if constexpr (kMaxRows > 1) {
    if (num_rows < kMaxRows) {
      MultiplyRows<V, Multiply, kMaxRows - 1, kPanels, kPrefetch>(product, first_row, num_rows,
                                                                  panel_indices, prefetch, sums);
      return;
    }
  }
  MultiplyTile<V, Multiply, kMaxRows, kPanels, kPrefetch>(product, first_row, panel_indices,
                                                          prefetch, sums);
}

// All rows times these panels, in row tiles of equal height of at most kMaxRows; `finish(row,
// panel, low, high)` for each row and panel. From two row tiles up the time is spent in arithmetic
// on weights that the first tile brought into the cache, so with kPrefetchNext the panels that
// follow in memory are fetched meanwhile.
template <class V, class Multiply, int kMaxRows, int kPanels, bool kPrefetchNext, class Finish>
inline void MultiplyBlock(const PanelProduct& product, const int64_t* panel_indices,
                          const Finish& finish) {
  const int64_t num_tiles = (product.num_rows + kMaxRows - 1) / kMaxRows;
  // Spread evenly over all steps of all tiles; two lines a step are enough for two tiles.
  constexpr int kLinesPerStep = 2;
  const int64_t num_steps = NumSteps<V, Multiply>(product);
  const int64_t next_bytes = kPanels * product.panel_bytes;
  Prefetch next = {static_cast<const char*>(product.weights) +
                       (panel_indices[kPanels - 1] + 1) * product.panel_bytes,
                   (next_bytes + num_tiles * num_steps - 1) / (num_tiles * num_steps)};
  Sums<V> sums[kMaxRows * kPanels];
  int64_t first_row = 0;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t end_row = product.num_rows * (tile + 1) / num_tiles;
    const int64_t num_rows = end_row - first_row;
    if (kPrefetchNext && num_tiles > 1) {
      MultiplyRows<V, Multiply, kMaxRows, kPanels, kPrefetchNext ? kLinesPerStep : 0>(
          product, first_row, num_rows, panel_indices, next, sums);
      next.data += next.bytes_per_step * num_steps;
    } else {
      MultiplyRows<V, Multiply, kMaxRows, kPanels, 0>(product, first_row, num_rows, panel_indices,
                                                      next, sums);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int p = 0; p < kPanels; ++p) {
        const Sums<V>& sum = sums[r * kPanels + p];
        finish(first_row + r, panel_indices[p], sum.low, sum.high);
      }
    }
    first_row = end_row;
  }
}

// One panel after the other, for what the wider blocks leave over.
template <class V, class Multiply, class Finish>
inline void MultiplySinglePanels(const PanelProduct& product, int64_t first_panel,
                                 const Finish& finish) {
  for (int64_t p = first_panel; p < product.last_panel; ++p) {
    MultiplyBlock<V, Multiply, V::kStreamRows, 1, /*kPrefetchNext=*/false>(product, &p, finish);
  }
}

template <class V, class Multiply, class Finish>
inline void MultiplyPanels(const PanelProduct& product, const Finish& finish) {
  int64_t panel_indices[V::kStreamPanels > V::kTilePanels ? V::kStreamPanels : V::kTilePanels];
  if (product.num_rows <= V::kStreamRows) {
    // Few rows: the time is spent in reading weights, and memory serves several distant streams
    // faster than one.
    constexpr int kStreams = V::kStreamPanels;
    const int64_t distance = (product.last_panel - product.first_panel) / kStreams;
    for (int64_t i = 0; i < distance; ++i) {
      for (int s = 0; s < kStreams; ++s) panel_indices[s] = product.first_panel + i + s * distance;
      MultiplyBlock<V, Multiply, V::kStreamRows, kStreams, /*kPrefetchNext=*/false>(
          product, panel_indices, finish);
    }
    MultiplySinglePanels<V, Multiply>(product, product.first_panel + distance * kStreams, finish);
    return;
  }
  int64_t first_panel = product.first_panel;
  for (; first_panel + V::kTilePanels <= product.last_panel; first_panel += V::kTilePanels) {
    for (int p = 0; p < V::kTilePanels; ++p) panel_indices[p] = first_panel + p;
    // The prefetch may run past the last panel, into the next matrix or expert, which is as likely
    // to be next.
    MultiplyBlock<V, Multiply, V::kTileRows, V::kTilePanels, /*kPrefetchNext=*/true>(
        product, panel_indices, finish);
  }
  MultiplySinglePanels<V, Multiply>(product, first_panel, finish);
}

template <class V, class Multiply>
void GateUp(const GateUpArgs& args) {
  MultiplyPanels<V, Multiply>(
      args.product, [&args](int64_t row, int64_t panel, typename V::Vec gate, typename V::Vec up) {
        const int64_t column = panel * kPanelHalf;
        if (args.gate_bias != nullptr) {
          gate = V::Add(gate, V::LoadFloat32(args.gate_bias + column));
        }
        if (args.up_bias != nullptr) up = V::Add(up, V::LoadFloat32(args.up_bias + column));
        typename V::Vec value = Activate<V>(gate, up, args);
        char* out = static_cast<char*>(args.intermediate) + row * args.intermediate_stride_bytes;
        if (args.storage == kElementFloat32) {
          V::Store(out + column * 4, kElementFloat32, V::RoundTo(value, args.rounding), kPanelHalf);
        } else {
          V::Store(out + column * 2, args.storage, value, kPanelHalf);
        }
      });
}

template <class V, class Multiply>
void Down(const DownArgs& args) {
  MultiplyPanels<V, Multiply>(args.product, [&args](int64_t row, int64_t panel, typename V::Vec low,
                                                    typename V::Vec high) {
    const int64_t column = panel * kPanelColumns;
    if (args.bias != nullptr) {
      low = V::Add(low, V::LoadFloat32(args.bias + column));
      high = V::Add(high, V::LoadFloat32(args.bias + column + kPanelHalf));
    }
    float* out = args.output + row * args.num_columns + column;
    const int64_t count = args.num_columns - column;
    V::Store(out, kElementFloat32, low, static_cast<int>(count < kPanelHalf ? count : kPanelHalf));
    if (count > kPanelHalf) {
      V::Store(out + kPanelHalf, kElementFloat32, high,
               static_cast<int>(count < kPanelColumns ? count - kPanelHalf : kPanelHalf));
    }
  });
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CPU_PANEL_PRODUCT_PLAIN_H_
