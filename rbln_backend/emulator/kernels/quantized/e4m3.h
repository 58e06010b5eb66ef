// Products with weights of e4m3, and what those become on their way.
//
// Their words are packed as a matrix of half the depth in half precision is (pack_weight): panels
// [depth/2, 16, 2] of bytes, neighbours along the depth beside each other.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/e4m3.h"
#include "quantized/quantized.h"

namespace rbln {

void linear_e4m3(const QuantizedLinearArgs& args);

// What a number becomes, 256 times smaller (kE4m3Unit): half precision, which a load widens where
// the CPU converts it, else float.
using Expanded = std::conditional_t<kWidensHalves, f16, float>;

// Of each four depths the middle ones change places, so that a vector's even bytes go to where it
// was read, and its odd ones behind them.
inline int64_t expanded_place(int64_t depth) {
  return (depth & ~int64_t{3}) | (depth & 1) << 1 | (depth >> 1 & 1);
}

inline VecF in_expanded_order(VecF depths) {
  VecI places;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) places[i] = int32_t(expanded_place(i));
  return __builtin_shuffle(depths, places);
}

// The next `depths` (a multiple of 4) of a panel as [depths][16], in the order of expanded_place.
inline void expand(const uint8_t* panel, int64_t depths, f16* to) {
  using Halves = VecTypes<2 * kLanes>::S;
  // The sign's copy in the place of the exponent's highest bit, and the neighbour's bits, go.
  const auto half = [](Halves upper_byte) { return upper_byte >> 1 & int16_t(0xbf80); };
  for (int64_t t = 0; t < depths; t += 4) {
    for (int64_t i = 0; i < 2 * kPanel; i += 2 * kLanes) {
      const auto bytes = load_raw<Halves>(panel + t * kPanel + 2 * i);
      store_raw(to + t * kPanel + i, half(bytes << 8));
      store_raw(to + (t + 2) * kPanel + i, half(bytes));
    }
  }
}

// The same as float.
inline void expand(const uint8_t* panel, int64_t depths, float* to) {
  alignas(64) f16 halves[4 * kPanel];
  for (int64_t t = 0; t < depths; t += 4) {
    expand(panel + t * kPanel, 4, halves);
    for (int64_t i = 0; i < 4 * kPanel; i += kLanes) store(to + t * kPanel + i, load(halves + i));
  }
}

// The same as pairs of bf16, [depths/2][16][2], in order.
inline void expand(const uint8_t* panel, int64_t depths, bf16* to) {
  alignas(64) f16 halves[chunk_of(Format::e4m3) * kPanel];
  for (int64_t begin = 0; begin < depths; begin += chunk_of(Format::e4m3)) {
    const int64_t count = std::min(chunk_of(Format::e4m3), depths - begin);
    expand(panel + begin * kPanel, count, halves);
    for (int64_t t = 0; t < count; t += 2) {
      const f16 *first = halves + expanded_place(t) * kPanel,
                *second = halves + expanded_place(t + 1) * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes)
        store_raw(to + (begin + t) * kPanel + 2 * c,
                  (VecU)load(first + c) >> 16 | ((VecU)load(second + c) & 0xffff0000u));
    }
  }
}

}  // namespace rbln
