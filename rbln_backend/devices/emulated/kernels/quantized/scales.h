// The scales of packed weights as floats.
#pragma once

#include "core/simd.h"
#include "quantized/quantized.h"

namespace rbln {

// 2^(exponent - 127) of kLanes bytes; the largest stands for NaN.
inline VecF powers_of_two(const uint8_t* exponents) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  const VecU words = __builtin_convertvector(load_raw<Bytes>(exponents), VecU);
  // 2^-127 is a denormal float, and NaN is what infinity with a bit more is.
  const VecU odd = (VecU)((words == 0u) | (words == 255u));
  return (VecF)((words << 23) | (odd & 0x00400000u));
}

// The kPanel scales at `place`, times what the format's numbers are to be multiplied by.
inline void read_scales(const QuantizedWeight& weight, int64_t place, float unit, float* scales) {
  if (weight.format == Format::e2m1) {
    const auto* source = static_cast<const uint8_t*>(weight.scales) + place;
    for (int64_t c = 0; c < kPanel; c += kLanes)
      store(scales + c, powers_of_two(source + c) * unit);
    return;
  }
  RBLN_DISPATCH(weight.scale_dtype, S, {
    const S* source = static_cast<const S*>(weight.scales) + place;
    for (int64_t c = 0; c < kPanel; c += kLanes) store(scales + c, load(source + c) * unit);
  });
}

}  // namespace rbln
