// What a token weighs in the draw: e^(score - largest score), as a whole number of units of 2^-30.
//
// Sums of whole numbers are the same in every order, so on any number of threads and lanes the same
// tokens are kept and drawn. Nothing here is fused, for kernels without fused products.
#pragma once

#include <cstdint>
#include <limits>

#include "core/simd.h"

namespace rbln {

// Scores of one row, its logits over its temperature, padded with -inf to whole panels.
struct Scores {
  const float* values;
  int64_t width;  // with the padding
  float largest;
};

inline constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Of the largest score; less than half a unit of it counts as nothing.
inline constexpr float kUnits = 1073741824.0f;

// e^(score - largest), to about 2 ulp; 1e-13 at most for NaN.
inline VecF weight_of(VecF score, VecF largest) {
  const VecF x = max(score - largest, broadcast(-30.0f));
  // The addition rounds to a whole number.
  const VecF magic = broadcast(12582912.0f);
  const VecF n = (x * 1.44269504f + magic) - magic;
  const VecF r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  VecF p = r * 1.381455966e-3f + 8.368735580e-3f;
  p = p * r + 4.166838986e-2f;
  p = p * r + 1.666652048e-1f;
  p = p * r + 4.999999344e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const VecF power = (VecF)((VecI)(n + (magic + 127.0f)) << 23);
  return p * power;
}

// Whole units; none where the weight is less than `least`.
inline VecI units_of(VecF weight, VecF least) {
  const VecI units = __builtin_convertvector(weight * kUnits + 0.5f, VecI);
  return units & (weight >= least);
}

// Adds up units; for up to 2^12 vectors.
class UnitSum {
 public:
  void add(VecI units) {
    low_ = low_ + (units & 0x7fff);
    high_ = high_ + (units >> 15);
  }

  uint64_t total() const {
    uint64_t low = 0, high = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      low += uint32_t(low_[lane]);
      high += uint32_t(high_[lane]);
    }
    return low + (high << 15);
  }

 private:
  VecI low_{}, high_{};
};

}  // namespace rbln
