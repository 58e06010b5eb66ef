// Reductions and functions of vectors, from what simd.h has.
#pragma once

#include "core/simd.h"

namespace rbln {

template <int N, class Combine>
inline float reduce(typename VecTypes<N>::F value, Combine combine) {
  if constexpr (N == 2) {
    return combine(value[0], value[1]);
  } else {
    using Half = typename VecTypes<N / 2>::F;
    Half low, high;
    std::memcpy(&low, &value, sizeof(Half));
    std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof(Half), sizeof(Half));
    return reduce<N / 2>(combine(low, high), combine);
  }
}

inline float reduce_sum(VecF value) {
  return reduce<kLanes>(value, [](auto a, auto b) { return a + b; });
}

inline float reduce_max(VecF value) {
  return reduce<kLanes>(value, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x = fraction * 2^exponent with a whole exponent and a fraction of about 0.7 to 1.4, to about
// 1 ulp for |x| up to 1e6. A NaN stays one in the fraction.
struct Exponential {
  VecF fraction, exponent;
};

inline Exponential exp_parts(VecF x) {
  // The addition rounds to a whole number.
  const VecF magic = broadcast(12582912.0f);
  const VecF n = fma(x, broadcast(1.44269504f), magic) - magic;
  VecF r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  VecF p = broadcast(1.381455966e-3f);
  p = fma(p, r, broadcast(8.368735580e-3f));
  p = fma(p, r, broadcast(4.166838986e-2f));
  p = fma(p, r, broadcast(1.666652048e-1f));
  p = fma(p, r, broadcast(4.999999344e-1f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return {p, n};
}

// 2^n for whole n up to 127; 0 below -126.
inline VecF power_of_two(VecF n) {
  // The addition leaves n + 127, a float's exponent bits, in the low mantissa bits.
  const VecF shifted = max(broadcast(-127.0f), n) + broadcast(12582912.0f + 127.0f);
  return (VecF)((VecI)shifted << 23);
}

// e^x for x <= 0 to about 1 ulp: exactly 1 at 0, NaN for NaN, 1.2e-38 from -87.3 down.
inline VecF exp_nonpositive(VecF x) {
  const Exponential e = exp_parts(max(broadcast(-87.33f), x));
  return e.fraction * power_of_two(e.exponent);
}

// To about 2 ulp; NaN for NaN.
inline VecF tanh(VecF x) {
  const VecF square = x * x;
  VecF p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const VecF near = fma(p * square, x, x);
  const VecU sign = (VecU)x & 0x80000000u;
  const VecF e = exp_nonpositive((VecF)((VecU)(x + x) | 0x80000000u));
  const VecF far = (VecF)((VecU)((1.0f - e) / (1.0f + e)) | sign);
  return square < 0.390625f ? near : far;
}

}  // namespace rbln
