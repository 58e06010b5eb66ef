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

#include "linear/tile.h"
#include "quantized/fields.h"
#include "quantized/scales.h"

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
  using Offset = float;
  using Vec = VecF;
  // Per chunk and row: minus the sum of the activations, and one word per depth.
  static constexpr int kHead = 1;
  static constexpr int kWords = kHead + int(F::kChunk);
  static constexpr int kProducts = F::kCount;  // per word of weights

  // The words of one row, `stride` apart, from its kChunk activations.
  static void prepare(const float* values, float* target, int64_t stride) {
    float total = 0.0f;
    for (int64_t t = 0; t < F::kChunk; t += F::kCount) {
      for (int f = 0; f < F::kCount; ++f) {
        total += values[t + f];
        target[(1 + t + f) * stride] = values[t + f] * (1.0f / F::place(f));
      }
    }
    target[0] = -total;
  }

  static Vec start(const float* head, Vec offsets) { return broadcast(head[0]) * offsets; }
  static Vec offsets(VecI numbers) { return __builtin_convertvector(numbers, Vec); }
  static Vec activation(float word) { return broadcast(word); }

  static inline __attribute__((always_inline)) Vec weights(const uint32_t* words, int product) {
    return F::floats(load_raw<VecU>(words), product);
  }

  static Vec multiply(Vec a, Vec b, Vec sum) { return accumulate(a, b, sum); }

  static VecF finish(const float* /*head*/, int64_t /*stride*/, VecF scale, Vec sum, VecF total) {
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
  using Offset = int32_t;
  using Vec = VecI;
  // Per chunk and row: minus the sum of its numbers, what they were divided by, and pairs.
  static constexpr int kHead = 2;
  static constexpr int kWords = kHead + int(F::kChunk) / 2;
  static constexpr int kProducts = F::kCount / 2;

  static void prepare(const float* values, float* target, int64_t stride) {
    const WholeNumbers<F> numbers(values);
    target[0] = head(numbers.total);
    target[stride] = numbers.back;
    // A product takes two fields of a word, half of the word apart.
    for (int64_t p = 0; p < F::kChunk / 2; ++p) {
      const int64_t low = p / kProducts * F::kCount + p % kProducts;
      target[(kHead + p) * stride] = pair(numbers.of[low], numbers.of[low + kProducts]);
    }
  }

  static float pair(int32_t first, int32_t second) {
    return bit_cast<float>((first & 0xffff) | int32_t(uint32_t(second) << 16));
  }

  // The sums start from one more product of pairs: minus the total of up to 64 numbers is
  // taken as its lower 7 bits and the others, and the offset once as it is and once times 2^7.
  static float head(int32_t total) { return pair(-total & 0x7f, -total >> 7); }
  static Vec offsets(VecI numbers) { return numbers | numbers << (16 + 7); }
  static Vec start(const float* head, Vec offsets) {
    return add_products(activation(head[0]), offsets, Vec{});
  }
  static Vec activation(float word) { return Vec{} + bit_cast<int32_t>(word); }

  static inline __attribute__((always_inline)) Vec weights(const uint32_t* words, int product) {
    return F::pairs(load_raw<Halves>(words), product);
  }

  static Vec multiply(Vec a, Vec b, Vec sum) { return add_products(a, b, sum); }

  static VecF finish(const float* head, int64_t stride, VecF scale, Vec sum, VecF total) {
    return fma(scale * head[stride], __builtin_convertvector(sum, VecF), total);
  }
};

// Scales of chunks that share one, of kPanels panels.
template <class Tile, int kPanels>
struct Group {
  alignas(64) float scales[kPanels * kPanel];
  alignas(64) typename Tile::Offset offsets[kPanels * kPanel];

  // Of panel `nth`, from `place` in the weight's scales.
  void read(const QuantizedWeight& weight, int64_t place, int nth) {
    read_scales(weight, place, Tile::F::kUnit, scales + nth * kPanel);
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    for (int64_t c = 0; c < kPanel; c += kLanes) {
      VecI numbers = VecI{} + Tile::F::kOffset;
      if (weight.zeros != nullptr)
        numbers = __builtin_convertvector(load_raw<Bytes>(weight.zeros + place + c), VecI);
      store_raw(offsets + nth * kPanel + c, Tile::offsets(numbers));
    }
  }
};

// A word of a weight's fields, as a Tile multiplies them.
template <class Tile>
struct Packed {
  uint32_t fields;
};

template <class Tile>
struct Layout<Packed<Tile>> {
  using Vec = Tile::Vec;
  static constexpr int kStep = Tile::F::kCount;
  static constexpr int64_t kElements = kPanel;
  static constexpr int kProducts = Tile::kProducts;
  static inline __attribute__((always_inline)) Vec columns(const Packed<Tile>* row, int product,
                                                           int v) {
    return Tile::weights(&row[v * kLanes].fields, product);
  }
  static Vec activation(float word) { return Tile::activation(word); }
  static Vec multiply(Vec a, Vec b, Vec sum) { return Tile::multiply(a, b, sum); }
};

// One chunk of R rows and P panels: totals[r][c] += scale[c] * (products of row r and column c, whose
// numbers are stored plus an offset).
template <class Tile, int R, int P>
__attribute__((noinline)) void multiply_chunk(const Packed<Tile>* const (&panels)[P],
                                              const float* a, const float* scales,
                                              const typename Tile::Offset* offsets, int64_t depths,
                                              const Ahead<P>& ahead, float* totals) {
  using Vec = Tile::Vec;
  constexpr int C = P * kPanelVectors;
  Vec acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      acc[r][c] = Tile::start(a + r, load_raw<Vec>(offsets + c * kLanes));
  }
  multiply_panels<Packed<Tile>, R, P>(panels, a + Tile::kHead * R, depths, ahead, acc);
  // Read before totals are written, which to the compiler could be these.
  VecF scale[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) scale[c] = load(scales + c * kLanes);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* total = totals + (r * C + c) * kLanes;
      store(total, Tile::finish(a + r, R, scale[c], acc[r][c], load(total)));
    }
  }
}

}  // namespace rbln
