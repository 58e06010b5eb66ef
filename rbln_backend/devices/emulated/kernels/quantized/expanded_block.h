// A depth block of some panels, expanded.
#pragma once

#include <algorithm>

#include "quantized/expanded.h"
#include "quantized/scales.h"

namespace rbln {

// Of kPanels panels from `panel` on, as numbers of type W where it `expands`; goes through the depth
// block by block. `next` is the panel from which the thread goes on.
template <class Source_, class W, int kPanels>
class DepthBlock {
 public:
  using Source = Source_;
  static constexpr int64_t kChunk = Source::kChunk;

  DepthBlock(const QuantizedLinearArgs& args, int64_t panel, int64_t next, bool expands = true)
      : args_(args),
        panel_(panel),
        next_(next),
        scale_rows_(args.plain.depth / args.weight.group),
        expands_(expands) {}

  // Goes on to the next block; false past the last.
  bool advance() {
    begin_ = end_;
    end_ = std::min(begin_ + kBlockDepth, args_.plain.depth);
    if (begin_ == end_) return false;
    for (int64_t p = 0; expands_ && p < kPanels; ++p)
      Source::expand(bytes(p), depths(), numbers_[p]);
    for (int64_t t = begin_; t < end_; t += kChunk)
      for (int64_t p = 0; p < kPanels; ++p) read(t, p);
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
           bytes_of(inside(nth) * args_.plain.depth + begin_);
  }
  // From there to what comes next: the next block, or the first of the thread's next panels.
  int64_t onward() const {
    return bytes_of(is_last() ? (next_ - panel_) * args_.plain.depth - begin_ : depths());
  }
  static constexpr int64_t bytes_of(int64_t depths) { return depths * kPanel * Source::kBits / 8; }

  // The scales of the chunk at `t`, from the `nth` panel on.
  const float* scales(int64_t t, int64_t nth) const {
    return scales_[(t - begin_) / kChunk] + nth * kPanel;
  }

 private:
  // With room for activations in L1.
  static constexpr int64_t kBlockDepth = sizeof(W) == sizeof(float) ? 64 : 128;
  static constexpr int64_t kBlockChunks = kBlockDepth / kChunk;

  // Past the edge the last panel is read again; write_tile drops its columns.
  int64_t inside(int64_t nth) const {
    return std::min(panel_ + nth, panels_of(args_.plain.columns) - 1);
  }

  void read(int64_t t, int64_t nth) {
    const int64_t chunk = (t - begin_) / kChunk;
    const int64_t place = (inside(nth) * scale_rows_ + t / args_.weight.group) * kPanel;
    read_scales(args_.weight, place, Source::kUnit, scales_[chunk] + nth * kPanel);
  }

  const QuantizedLinearArgs& args_;
  const int64_t panel_, next_, scale_rows_;
  const bool expands_;
  int64_t begin_ = 0, end_ = 0;
  alignas(64) W numbers_[kPanels][kBlockDepth * kPanel];
  alignas(64) float scales_[kBlockChunks][kPanels * kPanel];
};

}  // namespace rbln
