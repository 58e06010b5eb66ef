// Activations as the tiles of vectors read them.
#pragma once

#include <algorithm>

#include "linear/linear.h"
#include "linear/tile.h"

namespace rbln {

// Per row group [words][rows of the group], for weights of type W: a word is a depth row widened to
// f32, or a bf16 pair where pairs are multiplied.
template <class W>
struct Activations {
  static constexpr int kWordDepth = Layout<W>::kStep / Layout<W>::kProducts;
  RowGroups groups;
  int64_t depth;  // padded to whole steps
  float* data;

  float* group(int64_t g, int64_t t) const {
    return data + groups.begin(g) * (depth / kWordDepth) + t / kWordDepth * groups.size(g);
  }
};

inline VecF in_order(VecF words) { return words; }

// The rows of one group, from elements of type T, each kLanes words in the order that kOrder gives
// them.
template <class T, VecF (*kOrder)(VecF) = in_order, class W>
void interleave_group(const LinearArgs& args, const Activations<W>& to, int64_t g) {
  constexpr int kWordDepth = Activations<W>::kWordDepth;
  const int size = to.groups.size(g);
  float* target = to.group(g, 0);
  for (int r = 0; r < size; ++r) {
    const T* row = static_cast<const T*>(args.x) + (to.groups.begin(g) + r) * args.x_stride;
    for (int64_t t = 0; t < to.depth; t += kLanes * kWordDepth) {
      float words[kLanes];
      T padded[kLanes * kWordDepth] = {};
      const int64_t inside = std::min<int64_t>(kLanes * kWordDepth, args.depth - t);
      const T* source = row + t;
      if (inside < kLanes * kWordDepth) {
        std::copy_n(source, std::max<int64_t>(inside, 0), padded);
        source = padded;
      }
      store(words, kOrder(kWordDepth == 1 ? load(source) : load_raw<VecF>(source)));
      const int64_t count = std::min<int64_t>(kLanes, (to.depth - t) / kWordDepth);
      for (int64_t i = 0; i < count; ++i) target[(t / kWordDepth + i) * size + r] = words[i];
    }
  }
}

}  // namespace rbln
