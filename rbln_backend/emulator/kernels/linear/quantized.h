// Products with weights of 4 or 8 bits; strides are in elements, as in types.h.
#pragma once

#include "linear/linear.h"

namespace rbln {

// Depths whose products are added up before they are multiplied by their columns' scales.
inline constexpr int64_t kChunk = 64;

// A weight is (field - 2^(bits - 1)) * scale. A word of 32 bits holds the fields of as many depths,
// the first in its lowest bits. Words and scales lie in panels of kPanel columns.
struct QuantizedWeight {
  int bits;               // 4 or 8
  int64_t group;          // depths that share a scale: a multiple of kChunk, or the whole depth
  const uint32_t* words;  // [columns/16, depth * bits / 32, 16]
  Dtype scale_dtype;
  const void* scales;  // [columns/16, depth / group, 16]
};

struct QuantizedLinearArgs {
  LinearArgs plain;  // its depth fills whole words; `packed` is not read
  QuantizedWeight weight;
};
void quantized_linear(const QuantizedLinearArgs& args);

}  // namespace rbln
