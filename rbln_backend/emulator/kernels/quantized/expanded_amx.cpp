// The products of expanded.cpp by tiles, for bf16 activations.
//
// A block of a few panels becomes bf16 in L1, where it is a column of B's tiles. As with weights of
// bf16, tiles multiply every number of rows, and the products of 32 depths count from the first.
#include "quantized/amx.h"

#include "core/amx.h"

#if defined(RBLN_TILES)

#include "core/team.h"
#include "linear/amx_tile.h"
#include "linear/output.h"
#include "quantized/blocks.h"
#include "quantized/expanded_block.h"

namespace rbln {
namespace {

constexpr int64_t kRowBlock = 256;        // rows whose totals one work item keeps
constexpr int64_t kItemPanels = 4;
constexpr int64_t kAhead = 4096;          // bytes of a panel that a lone group prefetches ahead
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds worth less than waking the team
constexpr int64_t kClaimWork = 1 << 21;   // multiply-adds that a thread should claim at once

// One work item: the groups [first, last) against kItemPanels panels from `panel` on.
template <class Source>
struct Item {
  const QuantizedLinearArgs& args;
  const TileActivations& x;
  const ChunkSums& row_sums;
  int64_t first, last, panel;

  using Block = DepthBlock<Source, bf16, kItemPanels>;

  // One group and P panels from the item's `nth` on, the sums continued from and left in `totals`.
  template <int R, int P>
  void tile(int64_t g, int64_t nth, const Block& block, float* totals) const {
    const int rows = x.size(g);
    if (block.begin() == 0) std::fill_n(totals, rows * P * kPanel, 0.0f);
    const bf16* numbers[P];
    for (int p = 0; p < P; ++p) numbers[p] = block.numbers(nth + p);
    Fetch<P> fetch = fetch_of<P>(g - first, nth, block);
    for (int64_t t = block.begin(); t < block.end(); t += Block::kChunk) {
      const int64_t depths = std::min(Block::kChunk, block.end() - t);
      const int64_t steps = (depths + amx::kDepth - 1) / amx::kDepth;
      alignas(64) float sums[R * amx::kRows * P * kPanel];
      constexpr int64_t kStride = P * amx::kRowBytes;
      amx::unroll<R * P>([]<int c>() __attribute__((always_inline)) { amx::zero<c>(); });
      multiply_steps<R, P>(x.group(g, t / amx::kDepth), rows, numbers, steps, fetch);
      amx::unroll<R * P>([&]<int c>() __attribute__((always_inline)) {
        amx::store<c>(sums + c / P * amx::kRows * P * kPanel + c % P * kPanel, kStride);
      });
      const float *scales = block.scales(t, nth), *shifts = block.shifts(t, nth);
      const float* of_row = row_sums.at(t / Block::kChunk, g * kGroupRows);
      for (int64_t i = 0; i < rows * P * kPanel; i += kLanes) {
        const int64_t c = i % (P * kPanel);
        VecF sum = fma(load(scales + c), load(sums + i), load(totals + i));
        if constexpr (Source::kShifts)
          sum = fma(load(shifts + c), broadcast(of_row[i / (P * kPanel)]), sum);
        store(totals + i, sum);
      }
      for (int p = 0; p < P; ++p) {
        numbers[p] += depths * kPanel;
        fetch.address[p] += steps * fetch.bytes;
      }
    }
    if (block.is_last())
      write_tile<bf16>(args.plain, g * kGroupRows, rows, (panel + nth) * kPanel,
                       int(P * kPanel / kLanes), totals);
  }

  // A lone group runs ahead of itself. Several share the fetching of what comes next.
  template <int P>
  Fetch<P> fetch_of(int64_t group, int64_t nth, const Block& block) const {
    const int64_t groups = last - first;
    Fetch<P> fetch;
    fetch.bytes = (Block::bytes_of(amx::kDepth) / groups + 63) / 64 * 64;
    const int64_t start =
        groups == 1 ? kAhead
                    : block.onward() + group * (block.depths() / amx::kDepth) * fetch.bytes;
    for (int p = 0; p < P; ++p)
      fetch.address[p] = reinterpret_cast<const char*>(block.bytes(nth + p)) + start;
    return fetch;
  }

  void run() const {
    alignas(64) float totals[kRowBlock * kItemPanels * kPanel];
    Block block(args, panel);
    amx::Block shape;
    while (block.advance()) {
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

template <class Source>
void expanded_linear_by_tiles(const QuantizedLinearArgs& args) {
  thread_local Buffer buffer;
  const LinearArgs& plain = args.plain;
  const int64_t steps = (plain.depth + amx::kDepth - 1) / amx::kDepth;
  const int64_t chunks = Source::kShifts ? plain.depth / Source::kChunk : 0;
  const int64_t words = plain.rows * steps * amx::kDepth / 2;
  float* const memory = buffer.take(words + plain.rows * chunks);
  const ChunkSums sums(plain.rows, memory + words);
  const TileActivations x{plain.rows, steps, reinterpret_cast<bf16*>(memory)};
  const int64_t panels = (plain.columns + kPanel - 1) / kPanel;
  const int64_t tiles = (panels + kItemPanels - 1) / kItemPanels;
  const int64_t block_groups = kRowBlock / kGroupRows;
  const int64_t row_blocks = (x.groups() + block_groups - 1) / block_groups;
  const int threads = team_size(plain.rows * plain.depth * plain.columns, kSerialWork);
  const bool is_small = plain.rows * plain.depth < (1 << 14);
  parallel_for(x.groups(), 1, is_small ? 1 : threads, [&](int64_t g) {
    arrange_group(plain, x, g);
    if constexpr (Source::kShifts)
      for (int r = 0; r < x.size(g); ++r)
        sums.add_up<bf16, Source::kChunk>(plain, g * kGroupRows + r);
  });
  const int64_t item_work = std::min(plain.rows, kRowBlock) * plain.depth * kItemPanels * kPanel;
  const int64_t grain = std::clamp<int64_t>(kClaimWork / item_work, 1, 4);
  parallel_for(row_blocks * tiles, grain, threads, [&](int64_t item) {
    const int64_t first = item / tiles * block_groups;
    const int64_t last = std::min(first + block_groups, x.groups());
    Item<Source>{args, x, sums, first, last, item % tiles * kItemPanels}.run();
  });
}

template void expanded_linear_by_tiles<E4m3>(const QuantizedLinearArgs&);
template void expanded_linear_by_tiles<Blocks4>(const QuantizedLinearArgs&);
template void expanded_linear_by_tiles<Blocks8<32, false>>(const QuantizedLinearArgs&);
template void expanded_linear_by_tiles<Blocks8<32, true>>(const QuantizedLinearArgs&);

}  // namespace rbln

#endif
