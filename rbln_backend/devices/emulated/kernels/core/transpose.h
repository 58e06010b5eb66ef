// Rows of a cache page turned into the columns of a panel.
#pragma once

#include <type_traits>
#include <utility>

#include "core/e4m3.h"
#include "core/simd.h"

namespace rbln {

using Eight = VecTypes<8>;

inline void transpose(Eight::U (&m)[8]) {
  using U = Eight::U;
  U a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = __builtin_shuffle(m[2 * i], m[2 * i + 1], U{0, 8, 1, 9, 4, 12, 5, 13});
    a[2 * i + 1] = __builtin_shuffle(m[2 * i], m[2 * i + 1], U{2, 10, 3, 11, 6, 14, 7, 15});
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < 2; ++j) {
      const U low = a[4 * i + j], high = a[4 * i + 2 + j];
      b[4 * i + 2 * j] = __builtin_shuffle(low, high, U{0, 1, 8, 9, 4, 5, 12, 13});
      b[4 * i + 2 * j + 1] = __builtin_shuffle(low, high, U{2, 3, 10, 11, 6, 7, 14, 15});
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    m[i] = __builtin_shuffle(b[i], b[i + 4], U{0, 1, 2, 3, 8, 9, 10, 11});
    m[i + 4] = __builtin_shuffle(b[i], b[i + 4], U{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

template <class T>
inline float to_float(T value) {
  if constexpr (sizeof(T) == 4) return value;
  else if constexpr (std::is_same_v<T, bf16>) return bit_cast<float>(uint32_t(value.bits) << 16);
  else if constexpr (std::is_same_v<T, e4m3>) return e4m3_to_float(value.bits);
  else return half_to_float(value.bits);
}

// Sixteen numbers as bf16.
template <class T>
inline Eight::U sixteen(const T* row) {
  if constexpr (std::is_same_v<T, bf16>) {
    return load_raw<Eight::U>(row);
  } else {
    bf16 numbers[16];
    for (int i = 0; i < 16; i += kLanes) store(numbers + i, load(row + i));
    return load_raw<Eight::U>(numbers);
  }
}

// Eight key rows become columns of bf16 pairs: out[d / 2 * kPanel + key], d even; beyond an odd depth
// there is zero. T has no number that bf16 has not.
template <class T>
void transpose_pairs(const T* const* rows, int64_t depth, uint32_t* out) {
  const auto bits = [](T number) { return bit_cast<uint32_t>(to_float(number)) >> 16; };
  int64_t d = 0;
  // Words of four bytes are turned, and their numbers looked up after.
  for (; std::is_same_v<T, e4m3> && d + 32 <= depth; d += 32) {
    Eight::U block[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) block[i] = load_raw<Eight::U>(rows[i] + d);
    transpose(block);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      Eight::U pairs[2];
      store_raw(pairs, widen_pairs(block[i]));
      store_raw(out + (d / 2 + 2 * i) * kPanel, pairs[0]);
      store_raw(out + (d / 2 + 2 * i + 1) * kPanel, pairs[1]);
    }
  }
  for (; d + 16 <= depth; d += 16) {
    Eight::U block[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) block[i] = sixteen(rows[i] + d);
    transpose(block);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store_raw(out + (d / 2 + i) * kPanel, block[i]);
  }
  for (; d < depth; d += 2)
    for (int i = 0; i < 8; ++i) {
      const uint32_t second = d + 1 < depth ? bits(rows[i][d + 1]) : 0;
      out[d / 2 * kPanel + i] = bits(rows[i][d]) | second << 16;
    }
}

// Eight key rows become columns: out[d * kPanel + key], d in [first, depth).
template <class T>
void transpose_keys(const T* const* rows, int64_t depth, float* out, int64_t first = 0) {
  int64_t d = first;
  for (; d + 8 <= depth; d += 8) {
    Eight::U block[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) block[i] = (Eight::U)widen<8>(rows[i] + d);
    transpose(block);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store_raw(out + (d + i) * kPanel, block[i]);
  }
  for (; d < depth; ++d)
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) out[d * kPanel + i] = to_float(rows[i][d]);
}

// The kPanel rows of a panel: out[d * kPanel + key], d in [0, depth).
template <class T>
void transpose_panel(const T* const* rows, int64_t depth, float* out) {
  for (int64_t i = 0; i < kPanel; i += 8) transpose_keys(rows + i, depth, out + i);
}

#if defined(RBLN_AVX512)
// Words of four bytes are turned, and their bytes converted after; again, the slower way, in the
// odd case of a NaN, at which a byte without its sign reaches its upper bit by one more.
template <>
inline void transpose_panel(const e4m3* const* rows, int64_t depth, float* out) {
  VecU above{};
  int64_t d = 0;
  for (; d + 32 <= depth; d += 32) {
    Eight::U low[8], high[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      low[i] = load_raw<Eight::U>(rows[i] + d);
      high[i] = load_raw<Eight::U>(rows[8 + i] + d);
    }
    transpose(low);
    transpose(high);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const VecU words = joined(low[i], high[i]);
      above |= (words & 0x7f7f7f7fu) + 0x01010101u;
      float* const columns = out + (d + 4 * i) * kPanel;
      [&]<int... F>(std::integer_sequence<int, F...>) {
        (store(columns + F * kPanel, e4m3_field<F>(words)), ...);
      }(std::make_integer_sequence<int, 4>{});
    }
  }
  uint32_t has_nan = 0;
  for (int i = 0; i < kLanes; ++i) has_nan |= above[i] & 0x80808080u;
  if (has_nan != 0) d = 0;
  transpose_keys(rows, depth, out, d);
  transpose_keys(rows + 8, depth, out + 8, d);
}
#endif

}  // namespace rbln
