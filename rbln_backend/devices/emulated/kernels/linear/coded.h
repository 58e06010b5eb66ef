// Weights of bf16 in 12 bits each, without loss: a decode step takes as long as reading them takes.
//
// Trained weights share few exponents: of numbers with a normal distribution one in some thousand has
// none of the 16 that end with the largest number's. All others are a sign, a mantissa and a code of
// 4 bits, which is added to the lowest of those exponents. Those few count as the smallest coded
// number, and what they are more than that stands in a list, whose products are added last.
#pragma once

#include <algorithm>

#include "linear/linear.h"
#include "linear/tile.h"

namespace rbln {

struct Coded {
  uint8_t byte;
};

// With AVX2 decoding takes longer than memory does, unless there are one or two rows.
inline constexpr bool kReadsCodes = kLanes == 16;
inline constexpr int kCodes = 16;

// A weight that has no code.
struct Uncoded {
  int32_t depth, column;
  float missing;  // less the smallest coded number
};

// What lies behind the codes.
struct CodedWeight {
  const uint32_t* lowest;  // the lowest exponent, where both numbers of a pair have theirs
  const int32_t* places;   // [panels + 1]: where a panel begins in the list
  const Uncoded* list;

  CodedWeight(const void* packed, int64_t panels, int64_t depth);

  // sums [R][P * kPanel], of the columns of P panels, += what their weights in the list make of
  // activations [words][R].
  template <int R, int P>
  void add_uncoded(int64_t first, int64_t panels, const float* activations, float* sums) const {
    const int32_t end = places[std::min(first + P, panels)];
    for (int32_t i = places[first]; i < end; ++i) {
      float* const own = sums + (list[i].column - first * kPanel);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float number = Layout<bf16>::number(activations, R, list[i].depth, r);
        own[r * P * kPanel] = __builtin_fmaf(number, list[i].missing, own[r * P * kPanel]);
      }
    }
  }
};

// Eight depths of a panel are four rows of pairs, in the space of three. A number in those has its
// own sign, code and mantissa, and between sign and code 4 bits for the fourth row: in the first row
// the code, in the second the upper half of the mantissa, in the third the lower half and the sign.
template <>
struct Layout<Coded> : Layout<bf16> {
  static constexpr int kStep = 8;
  static constexpr int64_t kElements = 12 * kPanel;
  static constexpr int kProducts = 4 * Layout<bf16>::kProducts;
  VecU lowest;

  inline __attribute__((always_inline)) VecF columns(const Coded* step, int product, int v) const {
    using Numbers = VecTypes<2 * kLanes>::H;
    const auto row = [=](int nth) {
      return load_raw<Numbers>(step + nth * kElements / 3 + v * kLanes * 4);
    };
    const int nth = product / Layout<bf16>::kProducts;
    VecU words;
    if (nth < 3) {
      words = (VecU)row(nth) & 0x87ff87ffu;
    } else {
      words = select_bits(0x07800780u, (VecU)(row(0) >> 4), (VecU)(row(1) >> 8));
      words = select_bits(0x07f807f8u, words, (VecU)(row(2) >> 12));
      words = select_bits(0x80008000u, (VecU)(row(2) << 4), words);
    }
    return part(words + lowest, product % Layout<bf16>::kProducts);
  }
};

inline CodedWeight::CodedWeight(const void* packed, int64_t panels, int64_t depth) {
  const int64_t bytes = panels * depth / Layout<Coded>::kStep * Layout<Coded>::kElements;
  lowest = reinterpret_cast<const uint32_t*>(static_cast<const Coded*>(packed) + bytes);
  places = reinterpret_cast<const int32_t*>(lowest + 1);
  list = reinterpret_cast<const Uncoded*>(places + panels + 1);
}

}  // namespace rbln
