// x W^T + bias over weights of e4m3.
//
// A byte takes several operations to become a float: a block of a few panels is expanded once, while
// it stays in L1, and meets every row group. Half precision is enough for a byte, and takes no more
// to be widened than bf16; where the CPU multiplies pairs of bf16, it becomes those. The sums of a chunk are multiplied by their scales and added up in order, whatever
// rows and columns a tile has, and so every row has the bits it has alone.
#include "quantized/e4m3.h"

#include "core/amx.h"
#include "core/team.h"
#include "linear/activations.h"
#include "linear/output.h"
#include "quantized/amx.h"
#include "quantized/scales.h"

namespace rbln {
namespace {

constexpr int64_t kChunk = chunk_of(Format::e4m3);
constexpr int64_t kBlockChunks = 2;
constexpr int64_t kBlockGroups = 16;      // row groups whose sums one work item keeps
constexpr int64_t kItemPanels = 2 * kTilePanels;
constexpr int64_t kAhead = 4096;          // bytes of a panel that a lone group prefetches ahead
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds worth less than waking the team
constexpr int64_t kClaimWork = 1 << 21;   // multiply-adds that a thread should claim at once

// One chunk of R rows and P panels: totals[r][c] += scales[c] * (products of row r and column c).
template <class W, int R, int P>
__attribute__((noinline)) void add_chunk(const W* const (&panels)[P], const float* a,
                                         int64_t depths, const Ahead<P>& ahead,
                                         const float* scales, float* totals) {
  constexpr int C = P * kPanelVectors;
  VecF acc[R][C] = {};
  multiply_panels<W, R, P>(panels, a, depths, ahead, acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* total = totals + (r * C + c) * kLanes;
      store(total, fma(load(scales + c * kLanes), acc[r][c], load(total)));
    }
  }
}

// Depths [begin, end) of an item's panels, and the scales of their chunks.
template <class W>
struct Block {
  int64_t begin, end;
  alignas(64) W numbers[kItemPanels][kBlockChunks * kChunk * kPanel];
  alignas(64) float scales[kBlockChunks][kItemPanels * kPanel];
};

// One work item: the row groups [first, last) against kItemPanels panels from `panel` on.
// Activations are of type T, weights become W.
template <class T, class W>
struct Item {
  const QuantizedLinearArgs& args;
  const Activations<W>& x;
  int64_t first, last, panel, scale_rows;

  int64_t depth() const { return args.plain.depth; }

  // An item that hangs over the edge reads the last panel again; write_tile drops its columns.
  int64_t inside(int64_t at) const {
    return std::min(at, (args.plain.columns + kPanel - 1) / kPanel - 1);
  }

  const uint8_t* panel_at(int64_t at, int64_t t) const {
    return reinterpret_cast<const uint8_t*>(args.weight.words) +
           (inside(at) * depth() + t) * kPanel;
  }

  void fill(Block<W>& block) const {
    const int64_t depths = block.end - block.begin;
    for (int64_t p = 0; p < kItemPanels; ++p) {
      expand(panel_at(panel + p, block.begin), depths, block.numbers[p]);    }
    for (int64_t t = block.begin; t < block.end; t += kChunk) {
      float* const scales = block.scales[(t - block.begin) / kChunk];
      const int64_t row = t / args.weight.group;
      for (int64_t p = 0; p < kItemPanels; ++p)
        read_scales(args.weight, (inside(panel + p) * scale_rows + row) * kPanel, kE4m3Unit,
                    scales + p * kPanel);
    }
  }

  // One group and P panels from the item's `nth` on, the sums continued from and left in `totals`.
  template <int R, int P>
  void tile(int64_t g, int64_t nth, const Block<W>& block, float* totals) const {
    if (block.begin == 0) std::fill_n(totals, R * P * kPanel, 0.0f);
    const W* numbers[P];
    for (int p = 0; p < P; ++p) numbers[p] = block.numbers[nth + p];
    Ahead<P> ahead = ahead_of<P>(g - first, nth, block);
    for (int64_t t = block.begin; t < block.end; t += kChunk) {
      const int64_t depths = std::min(kChunk, block.end - t);
      add_chunk<W, R, P>(numbers, x.group(g, t), depths, ahead,
                         block.scales[(t - block.begin) / kChunk] + nth * kPanel, totals);
      for (int p = 0; p < P; ++p) {
        numbers[p] += depths * kPanel;
        ahead.address[p] += depths / Layout<W>::kStep * ahead.step;
      }
    }
    if (block.end == depth())
      write_tile<T>(args.plain, x.groups.begin(g), R, (panel + nth) * kPanel, P * kPanelVectors,
                    totals);
  }

  // A lone group runs ahead of itself. Several share the fetching of what comes next: the next block
  // of these panels, or the next item's first.
  template <int P>
  Ahead<P> ahead_of(int64_t group, int64_t nth, const Block<W>& block) const {
    constexpr int64_t kStep = Layout<W>::kStep;
    const int64_t groups = last - first, depths = block.end - block.begin;
    const int64_t onward = block.end < depth() ? depths : kItemPanels * depth() - block.begin;
    Ahead<P> ahead;
    ahead.step = kStep * kPanel / groups;
    const int64_t start =
        groups == 1 ? kAhead : onward * kPanel + group * (depths / kStep) * ahead.step;
    for (int p = 0; p < P; ++p)
      ahead.address[p] =
          reinterpret_cast<const char*>(panel_at(panel + nth + p, block.begin)) + start;
    return ahead;
  }

  void run() const {
    alignas(64) float totals[kBlockGroups * kMaxTileRows * kItemPanels * kPanel];
    Block<W> block;
    const int64_t row0 = x.groups.begin(first);
    for (block.begin = 0; block.begin < depth(); block.begin = block.end) {
      block.end = std::min(block.begin + kBlockChunks * kChunk, depth());
      fill(block);
      for (int64_t g = first; g < last; ++g) {
        float* partial = totals + (x.groups.begin(g) - row0) * kItemPanels * kPanel;
        with_rows(x.groups.size(g), [&]<int R>() {
          if constexpr (is_narrow_group(R)) {
            tile<R, kItemPanels>(g, 0, block, partial);
          } else {
            tile<R, kTilePanels>(g, 0, block, partial);
            tile<R, kTilePanels>(g, kTilePanels, block, partial + R * kTileColumns);
          }
        });
      }
    }
  }
};

template <class T>
void run(const QuantizedLinearArgs& args) {
  constexpr bool kPairs = kMultipliesPairs && std::is_same_v<T, bf16>;
  using W = std::conditional_t<kPairs, bf16, Expanded>;
  thread_local Buffer buffer;
  const LinearArgs& plain = args.plain;
  const Activations<W> x{RowGroups(plain.rows), plain.depth, buffer.take(plain.rows * plain.depth)};
  const int64_t panels = (plain.columns + kPanel - 1) / kPanel;
  const int64_t tiles = (panels + kItemPanels - 1) / kItemPanels;
  const int64_t row_blocks = (x.groups.count + kBlockGroups - 1) / kBlockGroups;
  const int threads = team_size(plain.rows * plain.depth * plain.columns, kSerialWork);
  const bool is_small = plain.rows * plain.depth < (1 << 14);
  parallel_for(x.groups.count, 1, is_small ? 1 : threads, [&](int64_t g) {
    interleave_group<T, kPairs ? in_order : in_expanded_order>(plain, x, g);
  });
  const int64_t rows = std::min(plain.rows, kBlockGroups * kMaxTileRows);
  const int64_t item_work = rows * plain.depth * kItemPanels * kPanel;
  const int64_t scale_rows = plain.depth / args.weight.group;
  const int64_t grain = std::clamp<int64_t>(kClaimWork / item_work, 1, 4);
  parallel_for(row_blocks * tiles, grain, threads, [&](int64_t item) {
    const int64_t first = item / tiles * kBlockGroups;
    const int64_t last = std::min(first + kBlockGroups, x.groups.count);
    Item<T, W>{args, x, first, last, item % tiles * kItemPanels, scale_rows}.run();
  });
}

}  // namespace

void linear_e4m3(const QuantizedLinearArgs& args) {
  if (kMultipliesTiles && args.plain.dtype == Dtype::bf16) return linear_e4m3_by_tiles(args);
  RBLN_DISPATCH(args.plain.dtype, T, run<T>(args));
}

}  // namespace rbln
