// Products with weights of 4 or 8 bits; strides are in elements, as in types.h.
#pragma once

#include "linear/linear.h"

namespace rbln {

// Value of a field of a word. Of int4 and int8 an unsigned number less 2^(bits - 1), or less
// the zero point of its group and column; e4m3 and e2m1 are the floats of the Open Compute Project
// (e4m3fn: no infinities; its NaN is read as 480). blocks8 are signed bytes in groups of 16 or 32
// depths: see blocks.h.
enum class Format { int4, int8, e4m3, e2m1, blocks8 };

constexpr int bits_of(Format format) {
  return format == Format::int4 || format == Format::e2m1 ? 4 : 8;
}

// Depths whose products are added up before they are multiplied by their columns' scales. Scales of
// e2m1 are shared by 32 depths, of blocks8 by 16 at least, others by 64.
constexpr int64_t chunk_of(Format format) {
  switch (format) {
    case Format::e2m1: return 32;
    case Format::blocks8: return 16;
    default: return 64;
  }
}

// A weight is what its field stands for times its scale. A word of 32 bits holds
// the fields of as many depths, the first in its lowest bits. All lie in panels of kPanel columns;
// of e4m3 as expanded.h has them.
struct QuantizedWeight {
  Format format;
  int64_t group;          // depths that share a scale: whole chunks, or the whole depth
  const uint32_t* words;  // [columns/16, depth * bits / 32, 16]; null: there is no weight
  Dtype scale_dtype;
  const void* scales;    // [columns/16, depth / group, 16]; of e2m1 uint8: 2^(scale - 127)
  const uint8_t* zeros;  // the same shape; null for symmetric weights
};

struct QuantizedLinearArgs {
  LinearArgs plain;  // its depth fills whole words; `packed` is not read
  QuantizedWeight weight;
};
void quantized_linear(const QuantizedLinearArgs& args);

}  // namespace rbln
