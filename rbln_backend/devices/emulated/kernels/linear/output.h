// Shared parts of the linear kernels besides their products: memory for activations, and what
// becomes of finished sums.
#pragma once

#include <algorithm>
#include <vector>

#include "core/simd.h"
#include "linear/linear.h"

namespace rbln {

// Memory that grows and stays, aligned to a cache line.
struct Buffer {
  std::vector<float> memory;
  float* take(int64_t count) {
    if (int64_t(memory.size()) < count + 16) memory.resize(size_t(count + 16));
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) / 64 * 64);
  }
};

// Finished sums, [rows][vectors * kLanes], to the output: bias, rounding, the edge's columns.
template <class T>
void write_tile(const LinearArgs& args, int64_t row, int rows, int64_t column, int vectors,
                const float* sums) {
  const int64_t stride = args.out_stride == 0 ? args.columns : args.out_stride;
  for (int c = 0; c < vectors; ++c) {
    const int64_t first = column + c * kLanes;
    const int64_t count = std::min<int64_t>(kLanes, args.columns - first);
    if (count <= 0) return;
    const VecF bias = args.bias == nullptr
                          ? VecF{}
                          : load_some(static_cast<const T*>(args.bias) + first, count);
    for (int r = 0; r < rows; ++r) {
      const VecF sum = load(sums + (r * vectors + c) * kLanes);
      const VecF value = args.bias == nullptr ? sum : sum + bias;
      store_some(static_cast<T*>(args.out) + (row + r) * stride + first, value, count);
    }
  }
}

}  // namespace rbln
