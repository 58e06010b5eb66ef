// The tiles of quantized.cpp: one chunk of activations times the fields of a few panels.
//
// Numbers are stored plus an offset, each column's zero point or the format's. What it adds to a
// sum, the offset times the sum of the activations, is what the sum starts from, negated. Two ways
// to multiply, by the dtype of the activations:
//
// FloatTile, float32: fields become floats, some too large by a power of two.
// Their activations are divided by that power beforehand, which is exact. Only the float32 sums are
// rounded.
//
// ShortTile, bfloat16 and float16: the activations of a chunk become whole numbers of 16 bits, all
// times one power of two that gives the largest its full 15 bits. That is exact for the activations
// within 2^7 (bfloat16) or 2^4 (float16) of the largest; the others are rounded by at most 2^-16 of
// it. Products and sums of a chunk are whole numbers: exact, in any order. It takes half the
// multiplications of the other.
#pragma once

#include <algorithm>
#include <utility>

#include "quantized/fields.h"
#include "linear/tile.h"

namespace rbln {

// The activations of a chunk of one row; zero past the depth.
template <class F, class T>
void load_chunk(const T* row, int64_t depth, int64_t chunk, float* values) {
  const int64_t first = chunk * F::kChunk;
  for (int64_t t = 0; t < F::kChunk; t += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, depth - first - t);
    store(values + t, count > 0 ? load_some(row + first + t, count) : VecF{});
  }
}

template <class Decoder>
struct FloatTile {
  using F = Decoder;
  using Word = float;
  using Vec = VecF;
  // Per chunk and row: minus the sum of the activations, and one word per depth.
  static constexpr int kHead = 1;
  static constexpr int kWords = kHead + int(F::kChunk);
  static constexpr int kProducts = F::kCount;  // per word of weights

  // The words of one row, `stride` apart, from its kChunk activations.
  static void prepare(const float* values, Word* target, int64_t stride) {
    float total = 0.0f;
    for (int64_t t = 0; t < F::kChunk; t += F::kCount) {
      for (int f = 0; f < F::kCount; ++f) {
        total += values[t + f];
        target[(1 + t + f) * stride] = values[t + f] * (1.0f / F::place(f));
      }
    }
    target[0] = -total;
  }

  static Vec start(const Word* head, Vec offsets) { return broadcast(head[0]) * offsets; }
  static Vec activation(Word word) { return broadcast(word); }

  template <int kProduct>
  static inline __attribute__((always_inline)) Vec weights(const uint32_t* words) {
    return F::template floats<kProduct>(load_raw<VecU>(words));
  }

  static Vec multiply(Vec a, Vec b, Vec sum) { return accumulate(a, b, sum); }

  static VecF finish(const Word* /*head*/, int64_t /*stride*/, VecF scale, Vec sum, VecF total) {
    return fma(scale, sum, total);
  }
};

// The activations of a chunk as numbers of 16 bits: their sum, and what they were divided by.
template <class F>
struct WholeNumbers {
  int32_t of[F::kChunk];
  int32_t total = 0;
  float back;

  explicit WholeNumbers(const float* values) {
    uint32_t largest = 0;
    for (int64_t t = 0; t < F::kChunk; ++t)
      largest = std::max(largest, bit_cast<uint32_t>(values[t]) & 0x7fffffffu);
    const bool is_finite = largest < 0x7f800000u;
    // Of the powers of two from 2^-126 to 2^126, the one that brings the largest below 2^15.
    const int exponent = int(largest >> 23);
    const int up = is_finite ? std::clamp(127 + 14 + 127 - exponent, 1, 253) : 1;
    const float factor = bit_cast<float>(uint32_t(up) << 23);
    // Adding this rounds to a whole number, which the low bits then hold.
    constexpr float kWhole = 12582912.0f;
    for (int64_t t = 0; t < F::kChunk; ++t) {
      const float shifted = (is_finite ? values[t] * factor : 0.0f) + kWhole;
      of[t] = bit_cast<int32_t>(shifted) - bit_cast<int32_t>(kWhole);
      total += of[t];
    }
    back = is_finite ? bit_cast<float>(uint32_t(254 - up) << 23) : bit_cast<float>(0x7fc00000u);
  }
};

template <class Decoder>
struct ShortTile {
  using F = Decoder;
  using Word = int32_t;
  using Vec = VecI;
  // Per chunk and row: minus the sum of its numbers, what they were divided by, and pairs.
  static constexpr int kHead = 2;
  static constexpr int kWords = kHead + int(F::kChunk) / 2;
  static constexpr int kProducts = F::kCount / 2;

  static void prepare(const float* values, Word* target, int64_t stride) {
    const WholeNumbers<F> numbers(values);
    target[0] = -numbers.total;
    target[stride] = bit_cast<int32_t>(numbers.back);
    // A product takes two fields of a word, half of the word apart.
    for (int64_t p = 0; p < F::kChunk / 2; ++p) {
      const int64_t low = p / kProducts * F::kCount + p % kProducts;
      target[(kHead + p) * stride] =
          (numbers.of[low] & 0xffff) | int32_t(uint32_t(numbers.of[low + kProducts]) << 16);
    }
  }

  static Vec start(const Word* head, Vec offsets) { return (Vec{} + head[0]) * offsets; }
  static Vec activation(Word word) { return Vec{} + word; }

  template <int kProduct>
  static inline __attribute__((always_inline)) Vec weights(const uint32_t* words) {
    return F::template pairs<kProduct>(load_raw<Halves>(words));
  }

  static Vec multiply(Vec a, Vec b, Vec sum) { return add_products(a, b, sum); }

  static VecF finish(const Word* head, int64_t stride, VecF scale, Vec sum, VecF total) {
    const float back = bit_cast<float>(head[stride]);
    return fma(scale * back, __builtin_convertvector(sum, VecF), total);
  }
};

// What the sums of P panels' columns are made with, until another group begins.
template <class Tile, int P>
struct Group {
  alignas(64) float scales[P * kPanel];
  alignas(64) typename Tile::Word offsets[P * kPanel];
};

// One chunk of R rows and P panels: totals[r][c] += scale[c] * (products of row r and column c).
template <class Tile, int R, int P>
__attribute__((noinline)) void multiply_chunk(const uint32_t* const (&panels)[P],
                                              const typename Tile::Word* a,
                                              const Group<Tile, P>& group, int64_t steps,
                                              int64_t ahead, float* totals) {
  using Vec = Tile::Vec;
  constexpr int C = P * kPanelVectors;
  Vec acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      acc[r][c] = Tile::start(a + r, load_raw<Vec>(group.offsets + c * kLanes));
  }
  const typename Tile::Word* const head = a;
  a += Tile::kHead * R;
  const uint32_t* words[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) words[p] = panels[p];
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) __builtin_prefetch(words[p] + ahead);
    const auto product = [&]<int kProduct>() __attribute__((always_inline)) {
      // Words are read again from L1 for every field: holding them would cost the sums' registers.
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) asm("" : "+r"(words[p]));
      const auto column = [&](int c) __attribute__((always_inline)) {
        return Tile::template weights<kProduct>(words[c / kPanelVectors] +
                                                c % kPanelVectors * kLanes);
      };
      if constexpr (R < C) {
        Vec rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          rows[r] = Tile::activation(a[kProduct * R + r]);
          keep_in_register(rows[r]);
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          Vec value = column(c);
          if constexpr (R > 1) keep_in_register(value);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[r][c] = Tile::multiply(rows[r], value, acc[r][c]);
        }
      } else {
        Vec columns[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          columns[c] = column(c);
          keep_in_register(columns[c]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const Vec factor = Tile::activation(a[kProduct * R + r]);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) acc[r][c] = Tile::multiply(factor, columns[c], acc[r][c]);
        }
      }
    };
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
      (product.template operator()<I>(), ...);
    }(std::make_integer_sequence<int, Tile::kProducts>{});
    a += Tile::kProducts * R;
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) words[p] += kPanel;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* total = totals + (r * C + c) * kLanes;
      store(total, Tile::finish(head + r, R, load(group.scales + c * kLanes), acc[r][c], load(total)));
    }
  }
}

}  // namespace rbln
