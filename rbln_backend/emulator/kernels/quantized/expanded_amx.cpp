// The products of expanded.cpp by tiles, for bf16 activations.
//
// A block of a few panels becomes bf16 in L1, where it is a column of B's tiles. As with weights of
// bf16, tiles multiply every number of rows, and the products of 32 depths count from the first.
#include "quantized/amx.h"

#include "core/amx.h"

#if defined(RBLN_TILES)

#include "linear/amx_items.h"
#include "quantized/blocks.h"
#include "quantized/expanded_block.h"

namespace rbln {
namespace {

template <class Source>
struct Item : TileItem {
  const QuantizedLinearArgs& args;
  const ChunkSums& row_sums;

  using Block = DepthBlock<Source, bf16, kItemPanels>;

  // One group and P panels from the item's `nth` on, the sums continued from and left in `totals`.
  template <int R, int P>
  void tile(int64_t g, int64_t nth, const Block& block, float* totals) const {
    const int rows = x.size(g);
    if (block.begin() == 0) std::fill_n(totals, rows * P * kPanel, 0.0f);
    const bf16* numbers[P];
    const uint8_t* bytes[P];
    for (int p = 0; p < P; ++p) {
      numbers[p] = block.numbers(nth + p);
      bytes[p] = reinterpret_cast<const uint8_t*>(block.bytes(nth + p));
    }
    Fetch<P> ahead = fetch(g, bytes, block.depths() / amx::kDepth, Block::bytes_of(amx::kDepth),
                           block.onward());
    for (int64_t t = block.begin(); t < block.end(); t += Block::kChunk) {
      const int64_t depths = std::min(Block::kChunk, block.end() - t);
      const int64_t steps = (depths + amx::kDepth - 1) / amx::kDepth;
      alignas(64) float sums[R * amx::kRows * P * kPanel];
      constexpr int64_t kStride = P * amx::kRowBytes;
      amx::unroll<R * P>([]<int c>() __attribute__((always_inline)) { amx::zero<c>(); });
      multiply_steps<R, P>(x.group(g, t / amx::kDepth), rows, numbers, steps, ahead);
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
        ahead.address[p] += steps * ahead.bytes;
      }
    }
    if (block.is_last())
      write_tile<bf16>(args.plain, g * kGroupRows, rows, (panel + nth) * kPanel,
                       int(P * kPanel / kLanes), totals);
  }

  void run() const {
    alignas(64) float totals[kMaxRowBlock * kItemPanels * kPanel];
    Block block(args, panel, next);
    amx::Block shape;
    while (block.advance())
      this->for_each_tile(shape, totals, [&]<int R, int P>(int64_t g, int64_t nth, float* partial) {
        this->template tile<R, P>(g, nth, block, partial);
      });
  }
};

}  // namespace

template <class Source>
void expanded_linear_by_tiles(const QuantizedLinearArgs& args) {
  thread_local Buffer buffer;
  const LinearArgs& plain = args.plain;
  const int64_t chunks = Source::kShifts ? plain.depth / Source::kChunk : 0;
  const ChunkSums sums(plain.rows, buffer.take(plain.rows * chunks));
  if constexpr (Source::kShifts)
    parallel_for(plain.rows, 1, team_size(plain.rows * plain.depth, 1 << 14),
                 [&](int64_t row) { sums.add_up<bf16, Source::kChunk>(plain, row); });
  for_each_item(plain, kMaxRowBlock / kGroupRows,
                [&](const TileItem& item) { Item<Source>{item, args, sums}.run(); });
}

template void expanded_linear_by_tiles<E4m3>(const QuantizedLinearArgs&);
template void expanded_linear_by_tiles<Blocks4>(const QuantizedLinearArgs&);
template void expanded_linear_by_tiles<Blocks8<32, false>>(const QuantizedLinearArgs&);
template void expanded_linear_by_tiles<Blocks8<32, true>>(const QuantizedLinearArgs&);

}  // namespace rbln

#endif
