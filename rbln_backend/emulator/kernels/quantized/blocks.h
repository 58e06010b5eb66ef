// Blocks of integers, as llama.cpp has them: w = scale * q + minimum, both shared by a few depths.
//
// blocks4: numbers from 0 to 15. Of a word's eight depths the even ones lie in its lower half, the
// odd ones in the upper, so that a shift and a mask give pairs of neighbours. Without minima they
// are numbers less 8. blocks8: signed bytes in order.
//
// Where pairs are multiplied, numbers become bf16, which has whole numbers up to 256. 128 + q of four
// bits is 128's bits and q's: what that adds to a sum goes with the minimum, for the product of both
// with the activations is one with their sum.
#pragma once

#include "quantized/expanded.h"

namespace rbln {

template <class T>
using BlockNumber = std::conditional_t<kInPairs<T>, bf16, float>;

// Numbers of four bits, and bytes, where they lie, multiplied in pairs of bf16.
struct Nibbles {
  uint8_t two;
};
struct Bytes {
  int8_t one;
};

// Pair `pair` of the eight numbers in each word.
inline VecF pair_of_nibbles(VecU words, int pair) {
  return (VecF)select_bits(0x000f000fu, words >> (4 * pair), 0x43004300u);
}

// The first or second two of the bytes of each word.
inline VecF pair_of_bytes(VecI words, int pair) {
  const VecI moved = pair == 0 ? words << 16 : words;
  const VecF first = __builtin_convertvector(moved << 8 >> 24, VecF);
  const VecF second = __builtin_convertvector(moved >> 24, VecF);
  return (VecF)select_bits(0xffff0000u, (VecU)second, (VecU)first >> 16);
}

template <>
struct Layout<Nibbles> : PairLayout {
  static constexpr int kStep = 8;
  static constexpr int64_t kElements = kStep * kPanel / 2;
  static constexpr int kProducts = 4;
  static inline __attribute__((always_inline)) VecF columns(const Nibbles* row, int product, int v) {
    return pair_of_nibbles(load_raw<VecU>(row + v * kLanes * 4), product);
  }
};

template <>
struct Layout<Bytes> : PairLayout {
  static constexpr int kStep = 4;
  static constexpr int64_t kElements = kStep * kPanel;
  static constexpr int kProducts = 2;
  static inline __attribute__((always_inline)) VecF columns(const Bytes* row, int product, int v) {
    return pair_of_bytes(load_raw<VecI>(row + v * kLanes * 4), product);
  }
};

struct Blocks4 {
  static constexpr int kBits = 4;
  static constexpr int64_t kChunk = 32;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kShifts = true;
  static constexpr float kMiddle = 8.0f;  // of numbers without minima
  template <class W>
  static constexpr float kBias = std::is_same_v<W, bf16> ? 128.0f : 0.0f;
  template <class T>
  using Number = BlockNumber<T>;
  template <class W>
  using Packed = std::conditional_t<std::is_same_v<W, bf16>, Nibbles, W>;
  template <class W>
  static VecF order(VecF depths) {
    return depths;
  }

  static void expand(const uint8_t* panel, int64_t depths, bf16* to) {
    for (int64_t t = 0; t < depths; t += 8) {
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        const auto words = load_raw<VecU>(panel + t * kPanel / 2 + 4 * c);
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair)
          store_raw(to + (t + 2 * pair) * kPanel + 2 * c,
                    pair_of_nibbles(words, pair));
      }
    }
  }

  static void expand(const uint8_t* panel, int64_t depths, float* to) {
    for (int64_t t = 0; t < depths; t += 8) {
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        const auto words = load_raw<VecU>(panel + t * kPanel / 2 + 4 * c);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          const VecU number = words >> (16 * (i % 2) + 4 * (i / 2)) & 15u;
          store(to + (t + i) * kPanel + c, __builtin_convertvector((VecI)number, VecF));
        }
      }
    }
  }
};

template <int64_t kChunk_, bool kShifts_>
struct Blocks8 {
  static constexpr int kBits = 8;
  static constexpr int64_t kChunk = kChunk_;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kShifts = kShifts_;
  static constexpr float kMiddle = 0.0f;
  template <class W>
  static constexpr float kBias = 0.0f;
  template <class T>
  using Number = BlockNumber<T>;
  template <class W>
  using Packed = std::conditional_t<std::is_same_v<W, bf16>, Bytes, W>;
  template <class W>
  static VecF order(VecF depths) {
    return depths;
  }

  // Byte `kByte` of each word.
  template <int kByte>
  static VecF number(VecI words) {
    return __builtin_convertvector(words << (24 - 8 * kByte) >> 24, VecF);
  }

  static void expand(const uint8_t* panel, int64_t depths, bf16* to) {
    for (int64_t t = 0; t < depths; t += 4) {
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        const auto words = load_raw<VecI>(panel + t * kPanel + 4 * c);
        store_raw(to + t * kPanel + 2 * c, pair_of_bytes(words, 0));
        store_raw(to + (t + 2) * kPanel + 2 * c, pair_of_bytes(words, 1));
      }
    }
  }

  static void expand(const uint8_t* panel, int64_t depths, float* to) {
    for (int64_t t = 0; t < depths; t += 4) {
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        const auto words = load_raw<VecI>(panel + t * kPanel + 4 * c);
        float* const at = to + t * kPanel + c;
        store(at, number<0>(words));
        store(at + kPanel, number<1>(words));
        store(at + 2 * kPanel, number<2>(words));
        store(at + 3 * kPanel, number<3>(words));
      }
    }
  }
};

}  // namespace rbln
