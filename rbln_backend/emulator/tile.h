// The register tile of every matrix product: R rows by C vectors of columns.
//
// Each output element is one chain of fused multiply-adds over the depth, first to last. Splitting
// the rows, the columns or the depth (the accumulators continue where they were) cannot change a
// bit of it; linear and attention owe their batch invariance to this.
#pragma once

#include <utility>

#include "simd.h"

namespace rbln {

#if defined(RBLN_AVX512)
inline constexpr int kMaxTileRows = 12;  // 24 of 32 registers accumulate
inline constexpr int kTileVectors = 2;
#elif defined(RBLN_AVX2)
inline constexpr int kMaxTileRows = 6;  // 12 of 16 registers accumulate
inline constexpr int kTileVectors = 2;
#else
inline constexpr int kMaxTileRows = 2;
inline constexpr int kTileVectors = 4;
#endif
inline constexpr int kTileColumns = kTileVectors * kLanes;

// acc[r][c] += sum over t of a[r * ARow + t * AStep] * b[t * ldb + c]
template <int R, int C, int ARow, int AStep>
inline __attribute__((always_inline)) void multiply_add(int64_t depth, const float* a,
                                                        const float* b, int64_t ldb,
                                                        VecF (&acc)[R][C]) {
  for (int64_t t = 0; t < depth; ++t) {
    VecF column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = load(b + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const VecF row = broadcast(a[r * ARow]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = fma(row, column[c], acc[r][c]);
    }
    a += AStep;
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
