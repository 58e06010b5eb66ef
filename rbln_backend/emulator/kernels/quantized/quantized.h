// Products with weights of 4 or 8 bits; strides are in elements, as in types.h.
#pragma once

#include "linear/linear.h"

namespace rbln {

// Value of a field of a word. Of int4 and int8 an unsigned number less 2^(bits - 1), or less
// the zero point of its group and column; e4m3 and e2m1 are the floats of the Open Compute Project
// (e4m3fn: no infinities; its NaN is read as 480). blocks4 and blocks8 are integers in groups of 16
// or 32 depths that may have a least value each: see blocks.h.
enum class Format { int4, int8, e4m3, e2m1, blocks4, blocks8 };

constexpr int bits_of(Format format) {
  switch (format) {
    case Format::int4:
    case Format::e2m1:
    case Format::blocks4: return 4;
    default: return 8;
  }
}

constexpr bool is_of_blocks(Format format) {
  return format == Format::blocks4 || format == Format::blocks8;
}

// Depths whose products are added up before they are multiplied by their columns' scales. Scales of
// e2m1 are shared by 32 depths, of blocks8 by 16 at least, of blocks4 by 32, others by 64.
constexpr int64_t chunk_of(Format format) {
  switch (format) {
    case Format::e2m1:
    case Format::blocks4: return 32;
    case Format::blocks8: return 16;
    default: return 64;
  }
}

// A weight is what its field stands for times its scale, plus its minimum. A word of 32 bits holds
// the fields of as many depths, the first in its lowest bits. All lie in panels of kPanel columns;
// of e4m3 as expanded.h has them, of blocks4 as blocks.h.
struct QuantizedWeight {
  Format format;
  int64_t group;          // depths that share a scale: whole chunks, or the whole depth
  const uint32_t* words;  // [columns/16, depth * bits / 32, 16]; null: there is no weight
  Dtype scale_dtype;
  const void* scales;    // [columns/16, depth / group, 16]; of e2m1 uint8: 2^(scale - 127)
  const uint8_t* zeros;  // the same shape; null for symmetric weights
  const void* minima;    // the same shape and dtype as scales, of blocks alone; null: there are none
};

struct QuantizedLinearArgs {
  LinearArgs plain;  // its depth fills whole words; `packed` is not read
  QuantizedWeight weight;
};
void quantized_linear(const QuantizedLinearArgs& args);

// Columns of a weight of blocks, expanded: out[i] is column ids[i], or zero where there is none.
struct BlockRowsArgs {
  const int64_t* ids;
  int64_t count, columns, depth;
  QuantizedWeight weight;
  float* out;  // [count, depth]
};
void block_rows(const BlockRowsArgs& args);

}  // namespace rbln
