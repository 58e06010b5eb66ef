// A depth block of some panels of e4m3, expanded.
#pragma once

#include <algorithm>

#include "quantized/e4m3.h"
#include "quantized/scales.h"

namespace rbln {

// Of kPanels panels from `panel` on, as numbers of type W; goes through the depth block by block.
template <class W, int kPanels>
class DepthBlock {
 public:
  static constexpr int64_t kChunk = chunk_of(Format::e4m3);

  DepthBlock(const QuantizedLinearArgs& args, int64_t panel)
      : args_(args), panel_(panel), scale_rows_(args.plain.depth / args.weight.group) {}

  // Goes on to the next block; false past the last.
  bool advance() {
    begin_ = end_;
    end_ = std::min(begin_ + kBlockDepth, args_.plain.depth);
    if (begin_ == end_) return false;
    for (int64_t p = 0; p < kPanels; ++p) {
      expand(bytes(p), depths(), numbers_[p]);
      // Tiles read products of 32 depths.
      const int64_t whole = (depths() + 31) / 32 * 32;
      std::fill(numbers_[p] + depths() * kPanel, numbers_[p] + whole * kPanel, W{});
    }
    for (int64_t t = begin_; t < end_; t += kChunk) {
      const int64_t row = t / args_.weight.group;
      for (int64_t p = 0; p < kPanels; ++p)
        read_scales(args_.weight, (inside(p) * scale_rows_ + row) * kPanel, kE4m3Unit,
                    scales_[(t - begin_) / kChunk] + p * kPanel);
    }
    return true;
  }

  int64_t begin() const { return begin_; }
  int64_t end() const { return end_; }
  int64_t depths() const { return end_ - begin_; }
  bool is_last() const { return end_ == args_.plain.depth; }

  // Of the item's `nth` panel: the block's numbers, and the bytes that they were.
  const W* numbers(int64_t nth) const { return numbers_[nth]; }
  const uint8_t* bytes(int64_t nth) const {
    return reinterpret_cast<const uint8_t*>(args_.weight.words) +
           (inside(nth) * args_.plain.depth + begin_) * kPanel;
  }
  // From there to what comes next: the next block, or the next panels' first.
  int64_t onward() const {
    return (is_last() ? kPanels * args_.plain.depth - begin_ : depths()) * kPanel;
  }
  // The scales of the chunk at `t`, from the `nth` panel on.
  const float* scales(int64_t t, int64_t nth) const {
    return scales_[(t - begin_) / kChunk] + nth * kPanel;
  }

 private:
  static constexpr int64_t kBlockChunks = 2;  // with room for activations in L1
  static constexpr int64_t kBlockDepth = kBlockChunks * kChunk;

  // Past the edge the last panel is read again; write_tile drops its columns.
  int64_t inside(int64_t nth) const {
    return std::min(panel_ + nth, (args_.plain.columns + kPanel - 1) / kPanel - 1);
  }

  const QuantizedLinearArgs& args_;
  const int64_t panel_, scale_rows_;
  int64_t begin_ = 0, end_ = 0;
  alignas(64) W numbers_[kPanels][kBlockDepth * kPanel];
  alignas(64) float scales_[kBlockChunks][kPanels * kPanel];
};

}  // namespace rbln
