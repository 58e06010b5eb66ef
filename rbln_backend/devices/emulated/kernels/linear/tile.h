// The register tile of every matrix product: R rows by C vectors of columns.
//
// Each output element is one chain of fused multiply-adds over the depth, first to last. Splitting
// the rows, the columns or the depth (the accumulators continue where they were) cannot change a
// bit of it; linear and attention owe their batch invariance to this.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/simd.h"

namespace rbln {

// So many registers accumulate: 24 of AVX-512's 32, 12 of AVX2's 16, 8 of 16 elsewhere.
inline constexpr int kMaxTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;
inline constexpr int kTileVectors = kLanes == 4 ? 4 : 2;
inline constexpr int kTileColumns = kTileVectors * kLanes;

inline constexpr int kPanelVectors = int(kPanel) / kLanes;
inline constexpr int kTilePanels = kTileColumns / int(kPanel);

// Few rows leave registers free for twice the columns: enough chains to keep the units busy.
constexpr bool is_narrow_group(int rows) { return 2 * rows <= kMaxTileRows; }

// Product rules of an element type. `kStep` depth rows lie together in a panel, in `kElements`, and
// are multiplied in `kProducts` products, each by one word of activations per row, into sums of Vec.
template <class T>
struct Layout {
  using Vec = VecF;
  static constexpr int kStep = 1;
  static constexpr int64_t kElements = kPanel;
  static constexpr int kProducts = 1;
  // Columns [v * kLanes, ...) for product `product` of the step at `row`.
  static inline __attribute__((always_inline)) VecF columns(const T* row, int /*product*/, int v) {
    return load(row + v * kLanes);
  }
  static VecF activation(float word) { return broadcast(word); }
  static VecF multiply(VecF activation, VecF column, VecF sum) {
    return accumulate(activation, column, sum);
  }
};

// A word is two neighbours along the depth, on both sides, and the CPU multiplies pairs.
struct PairLayout {
  using Vec = VecF;
  static constexpr int kStep = 2;
  static constexpr int64_t kElements = kStep * kPanel;
  static constexpr int kProducts = 1;
  static VecF part(VecU words, int /*product*/) { return (VecF)words; }
  static VecF activation(float word) { return (VecF)(VecU{} + bit_cast<uint32_t>(word)); }
  // Of row r of activations [words][rows], at one depth.
  static float number(const float* activations, int rows, int64_t depth, int r) {
    const auto pair = bit_cast<uint32_t>(activations[depth / 2 * rows + r]);
    return bit_cast<float>(depth % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
  }
  static VecF multiply(VecF activation, VecF column, VecF sum) {
    return dot_pairs(activation, column, sum);
  }
};

// The neighbours' columns lie in the halves of a word, and are widened one after the other.
struct HalvesLayout {
  using Vec = VecF;
  static constexpr int kStep = 2;
  static constexpr int64_t kElements = kStep * kPanel;
  static constexpr int kProducts = 2;
  static VecF part(VecU words, int product) {
    return product == 0 ? (VecF)(words << 16) : high_halves(words);
  }
  static VecF activation(float word) { return broadcast(word); }
  static float number(const float* activations, int rows, int64_t depth, int r) {
    return activations[depth * rows + r];
  }
  static VecF multiply(VecF activation, VecF column, VecF sum) {
    return accumulate(activation, column, sum);
  }
};

template <>
struct Layout<bf16> : std::conditional_t<kMultipliesPairs, PairLayout, HalvesLayout> {
  static inline __attribute__((always_inline)) VecF columns(const bf16* row, int product, int v) {
    return part(load_raw<VecU>(row + v * kLanes * 2), product);
  }
};

// What a tile fetches meanwhile, to L1 or with a locality of 2 to L2: `step` bytes for each line of a
// layout's step, from one address per panel.
template <int P, int kLocality = 3>
struct Ahead {
  const char* address[P];
  int64_t step;
};

template <class T, int R, int P>
using Sums = typename Layout<T>::Vec[R][P * kPanelVectors];

// acc[r][c] += sum over t of a[t * R + r] * (column c of the panels at depth t), t in activation
// words: one depth row each, or Layout<T>::kStep where a word holds several.
template <class T, int R, int P, int kLocality>
inline __attribute__((always_inline)) void multiply_panels(const T* const (&panels)[P],
                                                           const float* a, int64_t depths,
                                                           const Ahead<P, kLocality>& ahead,
                                                           Sums<T, R, P>& acc,
                                                           const Layout<T> layout = {}) {
  using Vec = Layout<T>::Vec;
  constexpr int kStep = Layout<T>::kStep, kProducts = Layout<T>::kProducts;
  constexpr int kLines = std::max(int(Layout<T>::kElements * sizeof(T)) / 64, 1);
  constexpr int C = P * kPanelVectors;
  const T* row[P];
  const char* fetched[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) row[p] = panels[p], fetched[p] = ahead.address[p];
  for (int64_t t = 0; t < depths; t += kStep) {
#pragma GCC unroll 8
    for (int product = 0; product < kProducts; ++product) {
#pragma GCC unroll 8
      for (int p = 0; p < P && product < kLines; ++p) {
        __builtin_prefetch(fetched[p], 0, kLocality);
        // Not as one vector of addresses, which would go through memory.
        asm("" : "+r"(fetched[p]));
        fetched[p] += ahead.step;
      }
      // Later products read from L1 again: holding the words would cost the tile its registers.
#pragma GCC unroll 8
      for (int p = 0; p < P && product > 0; ++p) asm("" : "+r"(row[p]));
      // Whichever is fewer, rows or columns, stays in registers.
      if constexpr (R < C) {
        Vec rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          rows[r] = Layout<T>::activation(a[product * R + r]);
          keep_in_register(rows[r]);
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          Vec column =
              layout.columns(row[c / kPanelVectors], product, c % kPanelVectors);
          if constexpr (R > 1) keep_in_register(column);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[r][c] = Layout<T>::multiply(rows[r], column, acc[r][c]);
        }
      } else {
        Vec columns[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          columns[c] = layout.columns(row[c / kPanelVectors], product, c % kPanelVectors);
          keep_in_register(columns[c]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Vec factor = Layout<T>::activation(a[product * R + r]);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c)
            acc[r][c] = Layout<T>::multiply(factor, columns[c], acc[r][c]);
        }
      }
    }
    a += kProducts * R;
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      asm("" : "+r"(row[p]));
      row[p] += Layout<T>::kElements;
    }
  }
}

// acc[r][c] += sum over t of a[r * ARow + t] * (column c of row b + t * ldb), b widened to f32.
// With every row it fetches `ahead_step` bytes more from `ahead` on.
template <class T, int R, int C, int ARow, int kLocality>
inline __attribute__((always_inline)) void multiply_rows(int64_t depth, const float* a, const T* b, int64_t ldb,
                          const char* ahead, int64_t ahead_step, VecF (&acc)[R][C]) {
  constexpr int kBytes = C * kLanes * int(sizeof(T));
  for (int64_t t = 0; t < depth; ++t) {
    for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(ahead + line, 0, kLocality);
    ahead += ahead_step;
    if constexpr (R < C) {
      VecF rows[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        rows[r] = broadcast(a[r * ARow + t]);
        keep_in_register(rows[r]);
      }
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        VecF column = load(b + c * kLanes);
        if constexpr (R > 1) keep_in_register(column);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][c] = accumulate(rows[r], column, acc[r][c]);
      }
    } else {
      VecF columns[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        columns[c] = load(b + c * kLanes);
        keep_in_register(columns[c]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const VecF row = broadcast(a[r * ARow + t]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = accumulate(row, columns[c], acc[r][c]);
      }
    }
    b += ldb;
  }
}

// Calls f.template operator()<R>() for R = rows, 1 <= rows <= kMaxTileRows.
template <class F>
inline void with_rows(int rows, F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (void)((rows == I + 1 ? (f.template operator()<I + 1>(), true) : false) || ...);
  }(std::make_integer_sequence<int, kMaxTileRows>{});
}

// `rows` split into the fewest groups of at most kMaxTileRows, as even as possible.
struct RowGroups {
  int64_t rows, count;
  explicit RowGroups(int64_t rows_)
      : rows(rows_), count((rows_ + kMaxTileRows - 1) / kMaxTileRows) {}
  int64_t begin(int64_t group) const { return group * (rows / count) + smaller(group); }
  int size(int64_t group) const { return int(rows / count + (group < rows % count)); }

 private:
  int64_t smaller(int64_t group) const {
    const int64_t larger = rows % count;
    return group < larger ? group : larger;
  }
};

}  // namespace rbln
