// Low-rank adapters on plain pointers; strides are in elements, as in types.h.
#pragma once

#include <vector>

#include "core/types.h"

namespace rbln {

// One output slice of a packed projection, such as q of qkv.
struct LoraSlice {
  const void* b;  // [slots] packed matrices of [columns, rank]
  int64_t elements, columns;  // of one of them
};

struct LoraArgs {
  Dtype dtype;
  const void* x;  // [rows, depth], row stride
  int64_t rows, depth, x_stride;
  const int32_t* slots;  // [requests]: each owns rows / requests rows; -1: no adapter
  int64_t requests, slot_count;
  const void* a;  // [slot_count] packed matrices of [slices * rank, depth]
  int64_t a_elements, rank;
  std::vector<LoraSlice> slices;
  void* y;  // [rows, columns of all slices], contiguous: what the products are added to
};
void add_lora(const LoraArgs& args);

}  // namespace rbln
