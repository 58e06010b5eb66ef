// Activations as the tiles of vectors read them.
#pragma once

#include <algorithm>

#include "core/transpose.h"
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

// kLanes words of a row, in the order that kOrder gives them.
template <int kWordDepth, VecF (*kOrder)(VecF), class T>
VecF words_of(const T* row) {
  return kOrder(kWordDepth == 1 ? load(row) : load_raw<VecF>(row));
}

// The first words of some rows, as many as fill whole vectors; returns their number. Eight rows at a
// time: where there are fewer, what is stored beyond them makes room for the words behind.
template <int kWordDepth, VecF (*kOrder)(VecF), class T>
int64_t interleave_blocks(const T* const* rows, int size, int64_t depth, int64_t words,
                          float* target) {
  const int64_t beyond = std::max(0, 8 - size);
  const int64_t end = std::min(depth / kWordDepth, words - (beyond + size - 1) / size);
  for (int begin = 0; begin < size; begin += 8) {
    const int first = std::max(0, std::min(begin, size - 8));
    const T* some[8];
    for (int r = 0; r < 8; ++r) some[r] = rows[std::min(first + r, size - 1)];
    float* out = target + first;
    for (int64_t t = 0; t + kLanes <= end; t += kLanes) {
      Eight::U blocks[kLanes / 8][8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        float vector[kLanes];
        store(vector, words_of<kWordDepth, kOrder>(some[r] + t * kWordDepth));
#pragma GCC unroll 2
        for (int part = 0; part < kLanes / 8; ++part)
          blocks[part][r] = load_raw<Eight::U>(vector + 8 * part);
      }
#pragma GCC unroll 2
      for (auto& block : blocks) {
        transpose(block);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i, out += size) store_raw(out, block[i]);
      }
    }
  }
  return std::max<int64_t>(end, 0) / kLanes * kLanes;
}

// Some rows of `depth` elements of type T as [words][size], each kLanes words in the order that
// kOrder gives them; what their words hold beyond the depth is zero.
template <int kWordDepth, VecF (*kOrder)(VecF) = in_order, class T>
void interleave(const T* const* rows, int size, int64_t depth, int64_t words, float* target) {
  int64_t first = 0;
  if constexpr (kLanes >= 8)
    if (size > 1) first = interleave_blocks<kWordDepth, kOrder>(rows, size, depth, words, target);
  for (int r = 0; r < size; ++r) {
    for (int64_t t = first; t < words; t += kLanes) {
      float vector[kLanes];
      T padded[kLanes * kWordDepth] = {};
      const T* source = rows[r] + t * kWordDepth;
      const int64_t inside = depth - t * kWordDepth;
      if (inside < kLanes * kWordDepth) {
        std::copy_n(source, std::max<int64_t>(inside, 0), padded);
        source = padded;
      }
      store(vector, words_of<kWordDepth, kOrder>(source));
      const int64_t count = std::min<int64_t>(kLanes, words - t);
      for (int64_t i = 0; i < count; ++i) target[(t + i) * size + r] = vector[i];
    }
  }
}

// The rows of one group.
template <class T, VecF (*kOrder)(VecF) = in_order, class W>
void interleave_group(const LinearArgs& args, const Activations<W>& to, int64_t g) {
  constexpr int kWordDepth = Activations<W>::kWordDepth;
  const T* rows[kMaxTileRows] = {};
  for (int r = 0; r < to.groups.size(g); ++r)
    rows[r] = static_cast<const T*>(args.x) + (to.groups.begin(g) + r) * args.x_stride;
  interleave<kWordDepth, kOrder>(rows, to.groups.size(g), args.depth, to.depth / kWordDepth,
                                 to.group(g, 0));
}

}  // namespace rbln
