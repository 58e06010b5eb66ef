// Products with weights whose numbers are expanded once, and what a Source of them has.
//
// kBits of a number in its panel; kChunk, depths whose products share a scale; kUnit, what numbers
// that come out are to be multiplied by; Number<T>, what numbers become for activations of type T;
// Packed<W>, as what they can be multiplied where they are, with the same bits, or W; order, the
// order of their depths; and
//
// expand(panel, depths, to): the next `depths` of a panel, [depths][16]; as bf16 that is multiplied
// in pairs [depths/2][16][2].
#pragma once

#include <type_traits>

#include "core/e4m3.h"
#include "linear/activations.h"
#include "quantized/quantized.h"

namespace rbln {

// Weights of e4m3 or blocks8.
void expanded_linear(const QuantizedLinearArgs& args);

// True if activations of type T are multiplied in pairs.
template <class T>
inline constexpr bool kInPairs = kMultipliesPairs && std::is_same_v<T, bf16>;

// Numbers of e4m3 where they lie, multiplied in pairs of bf16.
template <>
struct Layout<e4m3> : PairLayout {
  static inline __attribute__((always_inline)) VecF columns(const e4m3* row, int /*product*/, int v) {
    return widen_pairs(row + v * kLanes * 2);
  }
};

// e4m3, whose words are packed as a matrix of half the depth in half precision is (pack_weight):
// panels [depth/2, 16, 2] of bytes, neighbours along the depth beside each other. A number becomes
// bf16 where pairs of those are multiplied, else half precision, which a load widens where the CPU
// converts it, else float; 256 times smaller.
struct E4m3 {
  static constexpr int kBits = 8;
  static constexpr int64_t kChunk = chunk_of(Format::e4m3);
  static constexpr float kUnit = kE4m3Unit;

  using Halves = std::conditional_t<kWidensHalves, f16, float>;
  template <class T>
  using Number = std::conditional_t<kInPairs<T>, bf16, Halves>;
  template <class W>
  using Packed = std::conditional_t<std::is_same_v<W, bf16>, e4m3, W>;

  // For half precision the middle ones of each four depths change places, so that a vector's even
  // bytes go to where it was read, and its odd ones behind them.
  static int64_t place(int64_t depth) {
    return (depth & ~int64_t{3}) | (depth & 1) << 1 | (depth >> 1 & 1);
  }

  template <class W>
  static VecF order(VecF depths) {
    if constexpr (std::is_same_v<W, bf16>) return depths;
    VecI places;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) places[i] = int32_t(place(i));
    return __builtin_shuffle(depths, places);
  }

  static void expand(const uint8_t* panel, int64_t depths, f16* to) {
    using Words = VecTypes<2 * kLanes>::S;
    // The sign's copy in the place of the exponent's highest bit, and the neighbour's bits, go.
    const auto half = [](Words upper_byte) { return upper_byte >> 1 & int16_t(0xbf80); };
    for (int64_t t = 0; t < depths; t += 4) {
      for (int64_t i = 0; i < 2 * kPanel; i += 2 * kLanes) {
        const auto bytes = load_raw<Words>(panel + t * kPanel + 2 * i);
        store_raw(to + t * kPanel + i, half(bytes << 8));
        store_raw(to + (t + 2) * kPanel + i, half(bytes));
      }
    }
  }

  static void expand(const uint8_t* panel, int64_t depths, float* to) {
    alignas(64) f16 halves[4 * kPanel];
    for (int64_t t = 0; t < depths; t += 4) {
      expand(panel + t * kPanel, 4, halves);
      for (int64_t i = 0; i < 4 * kPanel; i += kLanes) store(to + t * kPanel + i, load(halves + i));
    }
  }

  static void expand(const uint8_t* panel, int64_t depths, bf16* to) {
    for (int64_t i = 0; i < depths * kPanel; i += 2 * kLanes)
      store_raw(to + i, widen_pairs(reinterpret_cast<const e4m3*>(panel) + i));
  }
};

}  // namespace rbln
