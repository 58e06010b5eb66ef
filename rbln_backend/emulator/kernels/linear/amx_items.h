// Work items of a bf16 product by tiles: some groups of rows against a few panels of columns.
#pragma once

#include "core/amx.h"

#if defined(RBLN_TILES)

#include "core/team.h"
#include "linear/amx_tile.h"
#include "linear/output.h"

namespace rbln {

inline constexpr int64_t kMaxRowBlock = 256;  // rows whose sums one item keeps
inline constexpr int64_t kItemPanels = 4;

// The groups [first, last) against kItemPanels panels from `panel` on.
struct TileItem {
  const TileActivations& x;
  int64_t first, last, panel;
  int64_t next;  // the panel of this thread's next item

  // multiply.template operator()<R, P>(g, nth, sums), for every group g and P panels from the item's
  // nth on, with the same `sums` for them in every call: [rows of the group][P * kPanel].
  template <class Multiply>
  void for_each_tile(amx::Block& block, float* sums, const Multiply& multiply) const {
    for (int64_t g = first; g < last; ++g) {
      const int rows = x.size(g);
      float* partial = sums + (g - first) * kGroupRows * kItemPanels * kPanel;
      block.shape(rows);
      if (rows <= amx::kRows) {
        multiply.template operator()<1, 4>(g, 0, partial);
      } else {
        multiply.template operator()<2, 2>(g, 0, partial);
        multiply.template operator()<2, 2>(g, 2, partial + rows * 2 * kPanel);
      }
    }
  }

  // For a group that reads `steps` tiles of each panel, of `bytes` where they are fetched from. A lone
  // group runs ahead of itself. Several share what comes next, `onward` bytes from here.
  template <int P, class T>
  Fetch<P> fetch(int64_t g, const T* const (&panels)[P], int64_t steps, int64_t bytes,
                 int64_t onward) const {
    constexpr int64_t kAhead = 4096;
    const int64_t groups = last - first;
    Fetch<P> fetch;
    fetch.bytes = (bytes / groups + 63) / 64 * 64;
    const int64_t start = groups == 1 ? kAhead : onward + (g - first) * steps * fetch.bytes;
    for (int p = 0; p < P; ++p)
      fetch.address[p] = reinterpret_cast<const char*>(panels[p]) + start;
    return fetch;
  }
};

inline int64_t steps_of(const LinearArgs& args) {
  return (args.depth + amx::kDepth - 1) / amx::kDepth;
}

// run(item) for all of a product, by the team; an item has at most `block_groups` groups.
template <class Run>
void for_each_item(const LinearArgs& args, int64_t block_groups, const Run& run) {
  constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds worth less than waking the team
  constexpr int64_t kClaimWork = 1 << 21;   // multiply-adds that a thread should claim at once
  thread_local Buffer buffer;
  const int64_t steps = steps_of(args);
  float* const memory = buffer.take(args.rows * steps * amx::kDepth / 2);
  const TileActivations x{args.rows, steps, reinterpret_cast<bf16*>(memory)};
  const int64_t panels = (args.columns + kPanel - 1) / kPanel;
  const int64_t tiles = (panels + kItemPanels - 1) / kItemPanels;
  const int64_t row_blocks = (x.groups() + block_groups - 1) / block_groups;
  const int threads = team_size(args.rows * args.depth * args.columns, kSerialWork);
  const bool is_small = args.rows * args.depth < (1 << 14);
  parallel_for(x.groups(), 1, is_small ? 1 : threads,
               [&](int64_t g) { arrange_group(args, x, g); });
  const int64_t item_work =
      std::min(args.rows, block_groups * kGroupRows) * args.depth * kItemPanels * kPanel;
  const int64_t grain = std::clamp<int64_t>(kClaimWork / item_work, 1, 4);
  parallel_for(row_blocks * tiles, grain, threads, [&](int64_t item) {
    const int64_t first = item / tiles * block_groups;
    const int64_t last = std::min(first + block_groups, x.groups());
    const int64_t panel = item % tiles * kItemPanels;
    run(TileItem{x, first, last, panel, panel + to_own_next(item, grain, threads) * kItemPanels});
  });
}

}  // namespace rbln

#endif
