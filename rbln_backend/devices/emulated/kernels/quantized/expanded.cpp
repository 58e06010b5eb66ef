// x W^T + bias over weights of e4m3 and blocks8.
//
// A number takes several operations to become a float: a block of a few panels is expanded once,
// while it stays in L1, and meets every row group. Half precision is enough for e4m3, and takes no
// more to be widened than bf16; where the CPU multiplies pairs of bf16, numbers become those. The
// sums of a chunk are multiplied by their scales and added up in order, whatever rows and columns a
// tile has, and so every row has the bits it has alone.
#include "quantized/expanded.h"

#include "linear/activations.h"
#include "linear/items.h"
#include "linear/output.h"
#include "quantized/blocks.h"
#include "quantized/expanded_block.h"

namespace rbln {
namespace {

constexpr int64_t kBlockGroups = 16;      // row groups whose sums one work item keeps
constexpr int64_t kItemPanels = 2 * kTilePanels;
constexpr int64_t kGroupsInPlace = 2;     // that read numbers where they lie, if they can be
constexpr int64_t kAhead = 4096;          // bytes of a panel that a lone group prefetches ahead

// One chunk of R rows and P panels: totals[r][c] += scales[c] * (products of row r and column c).
template <class W, int R, int P>
__attribute__((noinline)) void add_chunk(const W* const (&panels)[P], const float* a,
                                         int64_t depths, const Ahead<P>& ahead,
                                         const float* scales, float* totals) {
  constexpr int C = P * kPanelVectors;
  VecF acc[R][C] = {};
  multiply_panels<W, R, P>(panels, a, depths, ahead, acc);
  // Read before totals are written, which to the compiler could be these.
  VecF scale[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) scale[c] = load(scales + c * kLanes);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* total = totals + (r * C + c) * kLanes;
      store(total, fma(scale[c], acc[r][c], load(total)));
    }
  }
}

// One work item: the row groups [first, last) against kItemPanels panels from `panel` on.
// Activations are of type T, weights become W.
template <class Source, class T, class W>
struct Item {
  const QuantizedLinearArgs& args;
  const Activations<W>& x;
  int64_t first, last, panel;
  int64_t next;  // the panel of this thread's next item

  using Block = DepthBlock<Source, W, kItemPanels>;

  // One group and P panels from the item's `nth` on, the sums continued from and left in `totals`.
  // Numbers are read as type N: expanded, or where they are.
  template <class N, int R, int P>
  void tile(int64_t g, int64_t nth, const Block& block, float* totals) const {
    if (block.begin() == 0) std::fill_n(totals, R * P * kPanel, 0.0f);
    const N* numbers[P];
    for (int p = 0; p < P; ++p) {
      if constexpr (std::is_same_v<N, W>) numbers[p] = block.numbers(nth + p);
      else numbers[p] = reinterpret_cast<const N*>(block.bytes(nth + p));
    }
    Ahead<P> ahead = ahead_of<N, P>(g - first, nth, block);
    for (int64_t t = block.begin(); t < block.end(); t += Block::kChunk) {
      const int64_t depths = std::min(Block::kChunk, block.end() - t);
      add_chunk<N, R, P>(numbers, x.group(g, t), depths, ahead, block.scales(t, nth), totals);
      for (int p = 0; p < P; ++p) {
        numbers[p] += depths / Layout<N>::kStep * Layout<N>::kElements;
        ahead.address[p] += depths / Layout<N>::kStep * ahead.step;
      }
    }
    if (block.is_last())
      write_tile<T>(args.plain, x.groups.begin(g), R, (panel + nth) * kPanel, P * kPanelVectors,
                    totals);
  }

  // A lone group runs ahead of itself. Several share the fetching of what comes next.
  template <class N, int P>
  Ahead<P> ahead_of(int64_t group, int64_t nth, const Block& block) const {
    constexpr int64_t kStep = Layout<N>::kStep;
    const int64_t groups = last - first;
    Ahead<P> ahead;
    ahead.step = Block::bytes_of(kStep) / groups;
    const int64_t start =
        groups == 1 ? kAhead : block.onward() + group * (block.depths() / kStep) * ahead.step;
    for (int p = 0; p < P; ++p)
      ahead.address[p] = reinterpret_cast<const char*>(block.bytes(nth + p)) + start;
    return ahead;
  }

  void run() const {
    using Packed = Source::template Packed<W>;
    // Too few groups to share them do not pay for writing numbers down.
    if (std::is_same_v<Packed, W> || last - first > kGroupsInPlace) run_over<W>();
    else run_over<Packed>();
  }

  template <class N>
  void run_over() const {
    alignas(64) float totals[kBlockGroups * kMaxTileRows * kItemPanels * kPanel];
    Block block(args, panel, next, std::is_same_v<N, W>);
    const int64_t row0 = x.groups.begin(first);
    while (block.advance()) {
      for (int64_t g = first; g < last; ++g) {
        float* partial = totals + (x.groups.begin(g) - row0) * kItemPanels * kPanel;
        with_rows(x.groups.size(g), [&]<int R>() {
          if constexpr (is_narrow_group(R)) {
            tile<N, R, kItemPanels>(g, 0, block, partial);
          } else {
            tile<N, R, kTilePanels>(g, 0, block, partial);
            tile<N, R, kTilePanels>(g, kTilePanels, block, partial + R * kTileColumns);
          }
        });
      }
    }
  }
};

template <class Source, class T>
void run(const QuantizedLinearArgs& args) {
  using W = Source::template Number<T>;
  thread_local Buffer buffer;
  const LinearArgs& plain = args.plain;
  float* const memory = buffer.take(plain.rows * plain.depth);
  const Activations<W> x{RowGroups(plain.rows), plain.depth, memory};
  for_items(
      plain, x.groups, kBlockGroups, kItemPanels,
      [&](int64_t g) { interleave_group<T, Source::template order<W>>(plain, x, g); },
      [&](int64_t first, int64_t last, int64_t panel, int64_t next) {
        Item<Source, T, W>{args, x, first, last, panel, next}.run();
      });
}

template <class Source>
void run_any(const QuantizedLinearArgs& args) {
  RBLN_DISPATCH(args.plain.dtype, T, (run<Source, T>(args)));
}

}  // namespace

void expanded_linear(const QuantizedLinearArgs& args) {
  if (args.weight.format == Format::e4m3) return run_any<E4m3>(args);
  return args.weight.group % 32 == 0 ? run_any<Blocks8<32>>(args) : run_any<Blocks8<16>>(args);
}

}  // namespace rbln
