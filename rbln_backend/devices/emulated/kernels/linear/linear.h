// Products with packed weights, and how a weight is packed.
#pragma once

#include "core/types.h"

namespace rbln {

inline int64_t panels_of(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

struct LinearArgs {
  Dtype dtype;
  const void* x;  // [rows, depth], row stride x_stride
  int64_t rows, depth, x_stride;
  const void* packed;  // see pack_weight
  const void* bias;    // [columns] or null
  int64_t columns;
  void* out;  // [rows, columns]
  int64_t out_stride = 0;  // 0: contiguous
  bool is_coded = false;   // packed is what code_weight made
};
void linear(const LinearArgs& args);

// A product for each head, of which `first` is the first: the others' inputs and weights lie so many
// elements further, their results beside each other.
void linear_heads(const LinearArgs& first, int64_t heads, int64_t x_elements,
                  int64_t packed_elements);

// Depth rows of a packed weight: bf16 neighbours along the depth share a word.
inline int64_t padded_depth(Dtype dtype, int64_t depth) {
  return dtype == Dtype::bf16 ? (depth + 1) / 2 * 2 : depth;
}

// weight [columns, depth] -> f32, f16: [columns/16, depth, 16]; bf16: [columns/16, depth/2, 16, 2].
// Both counts are rounded up and the fill is zero.
void pack_weight(Dtype dtype, const void* weight, int64_t columns, int64_t depth,
                 int64_t column_stride, void* packed);

// The same where the weight lies: [columns, depth], contiguous, both counts as they come out.
void pack_weight_in_place(Dtype dtype, void* weight, int64_t columns, int64_t depth);

// Makes panels of bf16 those of coded.h, where they lie. False if they stay as they are: the level
// reads none, the depth is no multiple of 8, or weights have too many exponents.
bool code_weight(void* packed, int64_t columns, int64_t depth);

// True if a product may read `packed`, of 2 bytes for each weight, as what code_weight made.
bool is_coded_weight(const void* packed, int64_t columns, int64_t depth);

}  // namespace rbln
