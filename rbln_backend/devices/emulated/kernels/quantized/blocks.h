// Signed bytes in order, in groups of 16 or 32 depths with a scale each.
//
// Where pairs are multiplied, numbers become bf16, which has whole numbers up to 256.
#pragma once

#include "quantized/expanded.h"

namespace rbln {

// Bytes where they lie, multiplied in pairs of bf16.
struct Bytes {
  int8_t one;
};

// The first or second two of the bytes of each word.
inline VecF pair_of_bytes(VecI words, int pair) {
  const VecI moved = pair == 0 ? words << 16 : words;
  const VecF first = __builtin_convertvector(moved << 8 >> 24, VecF);
  const VecF second = __builtin_convertvector(moved >> 24, VecF);
  return (VecF)select_bits(0xffff0000u, (VecU)second, (VecU)first >> 16);
}

template <>
struct Layout<Bytes> : PairLayout {
  static constexpr int kStep = 4;
  static constexpr int64_t kElements = kStep * kPanel;
  static constexpr int kProducts = 2;
  static inline __attribute__((always_inline)) VecF columns(const Bytes* row, int product, int v) {
    return pair_of_bytes(load_raw<VecI>(row + v * kLanes * 4), product);
  }
};

template <int64_t kChunk_>
struct Blocks8 {
  static constexpr int kBits = 8;
  static constexpr int64_t kChunk = kChunk_;
  static constexpr float kUnit = 1.0f;
  template <class T>
  using Number = std::conditional_t<kInPairs<T>, bf16, float>;
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
