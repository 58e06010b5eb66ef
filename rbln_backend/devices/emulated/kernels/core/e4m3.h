// Floats of a byte: a sign, four bits of exponent, three of mantissa, no infinity; up to 448.
//
// Half precision has all of them, 256 times smaller, with the same mantissa behind the same sign,
// and its conversion pays nothing for denormals, as which most small values arrive.
#pragma once

#include <type_traits>

#include "core/simd.h"

namespace rbln {

struct e4m3 {
  uint8_t bits;
};

// A number is its decoded value times this; scales include the factor.
inline constexpr float kE4m3Unit = 256.0f;

inline float e4m3_to_float(uint8_t bits) {
  const bool is_nan = (bits & 0x7fu) == 0x7fu;
  return half_to_float(uint16_t((bits & 0x80u) << 8 | (is_nan ? 0x7e00u : (bits & 0x7fu) << 7)));
}

template <int N>
inline typename VecTypes<N>::F widen(const e4m3* source) {
  using Words = typename VecTypes<N>::S;
  // The sign's copies fill the upper bits: the first is the half's sign, the next is cleared.
  const Words halves = (words_of_bytes<N>(source) << 7) & int16_t(0xbfff);
  const Words is_nan = (halves & 0x3f80) == 0x3f80;
  const Words stored = halves | (is_nan & 0x7e00);
  return widen<N>(reinterpret_cast<const f16*>(&stored));
}

// The same of byte `kField` of each word, but that a NaN reads as 480.
//
// The bits of a normal number are those of a float of another bias. A denormal one then reads as
// c/2 (1 + m/8), c the least normal number, instead of c m/8: twice what is read less c. For normal
// numbers that is no less than what is read, and so the smaller of both is right for either.
template <int kField>
inline __attribute__((always_inline)) VecF e4m3_field(VecU word) {
  constexpr int shift = 20 - 8 * kField;
  const VecU moved = shift > 0 ? word << (shift > 0 ? shift : 0) : word >> (shift > 0 ? 0 : -shift);
  const VecF read = (VecF)select_bits(0x07f00000u, moved, 0x38000000u);
  const VecF size = min(read, fma(read, broadcast(2.0f), broadcast(-6.103515625e-05f)));
  return (VecF)select_bits(0x80000000u, word << (24 - 8 * kField), (VecU)size);
}

// The bytes of bf16 for every number's size, kE4m3Unit times smaller.
struct E4m3Bytes {
  alignas(64) uint8_t lower[128]{}, upper[128]{};

  constexpr E4m3Bytes() {
    for (int code = 1; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      // A denormal number's first bit goes to where a normal one's is left out.
      if (exponent == 0)
        for (exponent = 1; mantissa < 8; mantissa <<= 1) --exponent;
      const int bits = code == 127 ? 0x7fc0 : (exponent + 112) << 7 | (mantissa & 7) << 4;
      lower[code] = uint8_t(bits);
      upper[code] = uint8_t(bits >> 8);
    }
  }
};
inline constexpr E4m3Bytes kE4m3Bytes;

#if defined(RBLN_BF16_DOT)
// Two neighbours of `numbers`, each of which is there twice, become a pair of bf16, kE4m3Unit times
// smaller.
inline VecF bf16_pairs(VecU numbers) {
  const VecU sizes = look_up_in_turn(kE4m3Bytes.lower, kE4m3Bytes.upper, numbers);
  return (VecF)select_bits(0x80008000u, numbers, sizes);
}

// The bytes of eight words in this order.
template <class Order>
inline VecU shuffle_bytes(VecTypes<kLanes / 2>::U words, Order order) {
  using Bytes = VecTypes<4 * kLanes>::B;
  Bytes places;
#pragma GCC unroll 64
  for (int i = 0; i < 4 * kLanes; ++i) places[i] = int8_t(order(i));
  return (VecU)__builtin_shuffle((Bytes)joined(words, words), places);
}

// 2 kLanes numbers in a row.
inline VecF widen_pairs(const e4m3* source) {
  const auto words = load_raw<VecTypes<kLanes / 2>::U>(source);
  return bf16_pairs(shuffle_bytes(words, [](int i) { return i / 2; }));
}

// The first two numbers of each word, then the other two of each.
inline VecF widen_pairs(VecTypes<kLanes / 2>::U words) {
  return bf16_pairs(shuffle_bytes(
      words, [](int i) { return i % 32 / 4 * 4 + i / 32 * 2 + i % 4 / 2; }));
}
#else
// Nothing calls them.
VecF widen_pairs(const e4m3* source);
VecF widen_pairs(VecTypes<8>::U words);
#endif

// To the nearest, ties to even; what is larger than 448 becomes 448; a NaN stays one.
inline void store(e4m3* target, VecF value) {
  const VecU sign = ((VecU)value >> 24) & 0x80u;
  const VecF size = min(broadcast(448.0f), (VecF)((VecU)value & 0x7fffffffu));
  const VecU bits = (VecU)size;
  const VecU normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 numbers lie 2^-9 apart, as floats do from 2^14 on: the addition rounds.
  const VecU small = (VecU)(size + 16384.0f) - 0x46800000u;
  const VecU rounded = bits < 0x3c800000u ? small : normal;
  const VecU stored = (value != value ? VecU{} + 0x7fu : rounded) | sign;
  store_raw(target, __builtin_convertvector((VecI)stored, VecTypes<kLanes>::B));
}

}  // namespace rbln
