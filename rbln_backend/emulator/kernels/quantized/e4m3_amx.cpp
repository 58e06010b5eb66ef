// The product of e4m3.cpp by tiles, for bf16 activations.
//
// A block of a few panels becomes bf16 in L1, where it is a column of B's tiles. As with weights of
// bf16, tiles multiply every number of rows, and the products of 32 depths count from the first.
#include "quantized/amx.h"

#include "core/amx.h"

#if defined(RBLN_TILES)

#include "linear/amx_items.h"
#include "quantized/e4m3_block.h"

namespace rbln {
namespace {

using Block = DepthBlock<bf16, kItemPanels>;

struct Item : TileItem {
  const QuantizedLinearArgs& args;

  // One group and P panels from the item's `nth` on, the sums continued from and left in `totals`.
  template <int R, int P>
  void tile(int64_t g, int64_t nth, const Block& block, float* totals) const {
    const int rows = x.size(g);
    if (block.begin() == 0) std::fill_n(totals, rows * P * kPanel, 0.0f);
    const bf16* numbers[P];
    const uint8_t* bytes[P];
    for (int p = 0; p < P; ++p) {
      numbers[p] = block.numbers(nth + p);
      bytes[p] = block.bytes(nth + p);
    }
    Fetch<P> ahead = fetch(g, bytes, block.depths() / amx::kDepth, amx::kDepth * kPanel,
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
      const float* scales = block.scales(t, nth);
      for (int64_t i = 0; i < rows * P * kPanel; i += kLanes)
        store(totals + i, fma(load(scales + i % (P * kPanel)), load(sums + i), load(totals + i)));
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
    Block block(args, panel);
    amx::Block shape;
    while (block.advance())
      for_each_tile(shape, totals, [&]<int R, int P>(int64_t g, int64_t nth, float* partial) {
        tile<R, P>(g, nth, block, partial);
      });
  }
};

}  // namespace

void linear_e4m3_by_tiles(const QuantizedLinearArgs& args) {
  for_each_item(args.plain, kMaxRowBlock / kGroupRows,
                [&](const TileItem& item) { Item{item, args}.run(); });
}

}  // namespace rbln

#endif
