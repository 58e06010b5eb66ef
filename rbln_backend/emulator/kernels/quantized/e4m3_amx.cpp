// The product of e4m3.cpp by tiles, for bf16 activations.
//
// A block of a few panels becomes bf16 in L1, where it is a column of B's tiles. As with weights of
// bf16, tiles multiply every number of rows, and the products of 32 depths count from the first.
#include "quantized/amx.h"

#include "core/amx.h"

#if defined(RBLN_TILES)

#include "core/team.h"
#include "linear/amx_tile.h"
#include "linear/output.h"
#include "quantized/e4m3.h"
#include "quantized/scales.h"

namespace rbln {
namespace {

constexpr int64_t kChunk = chunk_of(Format::e4m3);
constexpr int64_t kBlockChunks = 2;
constexpr int64_t kRowBlock = 256;        // rows whose totals one work item keeps
constexpr int64_t kItemPanels = 4;
constexpr int64_t kAhead = 4096;          // bytes of a panel that a lone group prefetches ahead
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds worth less than waking the team
constexpr int64_t kClaimWork = 1 << 21;   // multiply-adds that a thread should claim at once

// Depths [begin, end) of an item's panels, zero up to whole tiles, and the scales of their chunks.
struct Block {
  int64_t begin, end;
  alignas(64) bf16 numbers[kItemPanels][kBlockChunks * kChunk * kPanel];
  alignas(64) float scales[kBlockChunks][kItemPanels * kPanel];
};

// One work item: the groups [first, last) against kItemPanels panels from `panel` on.
struct Item {
  const QuantizedLinearArgs& args;
  const TileActivations& x;
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

  void fill(Block& block) const {
    const int64_t depths = block.end - block.begin;
    const int64_t whole = (depths + amx::kDepth - 1) / amx::kDepth * amx::kDepth;
    for (int64_t p = 0; p < kItemPanels; ++p) {
      bf16* const numbers = block.numbers[p];
      expand(panel_at(panel + p, block.begin), depths, numbers);
      std::fill(numbers + depths * kPanel, numbers + whole * kPanel, bf16{0});    }
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
  void tile(int64_t g, int64_t nth, const Block& block, float* totals) const {
    const int rows = x.size(g);
    if (block.begin == 0) std::fill_n(totals, rows * P * kPanel, 0.0f);
    const bf16* numbers[P];
    for (int p = 0; p < P; ++p) numbers[p] = block.numbers[nth + p];
    Fetch<P> fetch = fetch_of<P>(g - first, nth, block);
    for (int64_t t = block.begin; t < block.end; t += kChunk) {
      const int64_t depths = std::min(kChunk, block.end - t);
      const int64_t steps = (depths + amx::kDepth - 1) / amx::kDepth;
      alignas(64) float sums[R * amx::kRows * P * kPanel];
      constexpr int64_t kStride = P * amx::kRowBytes;
      amx::unroll<R * P>([]<int c>() __attribute__((always_inline)) { amx::zero<c>(); });
      multiply_steps<R, P>(x.group(g, t / amx::kDepth), rows, numbers, steps, fetch);
      amx::unroll<R * P>([&]<int c>() __attribute__((always_inline)) {
        amx::store<c>(sums + c / P * amx::kRows * P * kPanel + c % P * kPanel, kStride);
      });
      const float* scales = block.scales[(t - block.begin) / kChunk] + nth * kPanel;
      for (int64_t i = 0; i < rows * P * kPanel; i += kLanes)
        store(totals + i, fma(load(scales + i % (P * kPanel)), load(sums + i), load(totals + i)));
      for (int p = 0; p < P; ++p) {
        numbers[p] += depths * kPanel;
        fetch.address[p] += steps * fetch.bytes;
      }
    }
    if (block.end == depth())
      write_tile<bf16>(args.plain, g * kGroupRows, rows, (panel + nth) * kPanel,
                       int(P * kPanel / kLanes), totals);
  }

  // A lone group runs ahead of itself. Several share the fetching of what comes next: the next block
  // of these panels, or the next item's first.
  template <int P>
  Fetch<P> fetch_of(int64_t group, int64_t nth, const Block& block) const {
    const int64_t groups = last - first, depths = block.end - block.begin;
    const int64_t onward = block.end < depth() ? depths : kItemPanels * depth() - block.begin;
    Fetch<P> fetch;
    fetch.bytes = (amx::kDepth * kPanel / groups + 63) / 64 * 64;
    const int64_t start = groups == 1
                              ? kAhead
                              : onward * kPanel + group * (depths / amx::kDepth) * fetch.bytes;
    for (int p = 0; p < P; ++p)
      fetch.address[p] =
          reinterpret_cast<const char*>(panel_at(panel + nth + p, block.begin)) + start;
    return fetch;
  }

  void run() const {
    alignas(64) float totals[kRowBlock * kItemPanels * kPanel];
    Block block;
    amx::Block shape;
    for (block.begin = 0; block.begin < depth(); block.begin = block.end) {
      block.end = std::min(block.begin + kBlockChunks * kChunk, depth());
      fill(block);
      for (int64_t g = first; g < last; ++g) {
        const int rows = x.size(g);
        float* partial = totals + (g - first) * kGroupRows * kItemPanels * kPanel;
        shape.shape(rows);
        if (rows <= amx::kRows) {
          tile<1, 4>(g, 0, block, partial);
        } else {
          tile<2, 2>(g, 0, block, partial);
          tile<2, 2>(g, 2, block, partial + rows * 2 * kPanel);
        }
      }
    }
  }
};

}  // namespace

void linear_e4m3_by_tiles(const QuantizedLinearArgs& args) {
  thread_local Buffer buffer;
  const LinearArgs& plain = args.plain;
  const int64_t steps = (plain.depth + amx::kDepth - 1) / amx::kDepth;
  float* const memory = buffer.take(plain.rows * steps * amx::kDepth / 2);
  const TileActivations x{plain.rows, steps, reinterpret_cast<bf16*>(memory)};
  const int64_t panels = (plain.columns + kPanel - 1) / kPanel;
  const int64_t tiles = (panels + kItemPanels - 1) / kItemPanels;
  const int64_t block_groups = kRowBlock / kGroupRows;
  const int64_t row_blocks = (x.groups() + block_groups - 1) / block_groups;
  const int threads = team_size(plain.rows * plain.depth * plain.columns, kSerialWork);
  const bool is_small = plain.rows * plain.depth < (1 << 14);
  parallel_for(x.groups(), 1, is_small ? 1 : threads,
               [&](int64_t g) { arrange_group(plain, x, g); });
  const int64_t item_work = std::min(plain.rows, kRowBlock) * plain.depth * kItemPanels * kPanel;
  const int64_t scale_rows = plain.depth / args.weight.group;
  const int64_t grain = std::clamp<int64_t>(kClaimWork / item_work, 1, 4);
  parallel_for(row_blocks * tiles, grain, threads, [&](int64_t item) {
    const int64_t first = item / tiles * block_groups;
    const int64_t last = std::min(first + block_groups, x.groups());
    Item{args, x, first, last, item % tiles * kItemPanels, scale_rows}.run();
  });
}

}  // namespace rbln

#endif
