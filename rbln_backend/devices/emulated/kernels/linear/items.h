// How the kernels with panels share a product among the team's threads.
#pragma once

#include <algorithm>

#include "core/team.h"
#include "linear/linear.h"
#include "linear/tile.h"

namespace rbln {

inline constexpr int64_t kSerialProduct = 1 << 17;  // multiply-adds worth less than waking the team

// Calls prepare(group) for all row groups, then run(first, last, panel, next) for blocks of at most
// `block_groups` of them, [first, last), and every `item_panels` panels from `panel` on. `next` is
// the panel of the same thread's next item, which it can fetch.
template <class Prepare, class Run>
void for_items(const LinearArgs& args, const RowGroups& groups, int64_t block_groups,
               int64_t item_panels, const Prepare& prepare, const Run& run) {
  constexpr int64_t kClaimWork = 1 << 21;  // multiply-adds that a thread should claim at once
  constexpr int64_t kMostClaimed = 8;      // items, however little work they are
  const int64_t work = args.rows * args.depth;
  const int threads = team_size(work * args.columns, kSerialProduct);
  parallel_for(groups.count, 1, team_size(work, 1 << 14), prepare);
  const int64_t tiles = (panels_of(args.columns) + item_panels - 1) / item_panels;
  const int64_t items = (groups.count + block_groups - 1) / block_groups * tiles;
  const int64_t rows = std::min(args.rows, block_groups * kMaxTileRows);
  const int64_t item_work = rows * args.depth * item_panels * kPanel;
  const int64_t most = std::clamp<int64_t>(kClaimWork / item_work, 1, kMostClaimed);
  // Every thread has as many claims, so that all end together.
  const int64_t turns = (items + threads * most - 1) / (threads * most);
  const int64_t grain = std::max<int64_t>(items / (threads * turns), 1);
  parallel_for(items, grain, threads, [&](int64_t item) {
    const int64_t first = item / tiles * block_groups, panel = item % tiles * item_panels;
    run(first, std::min(first + block_groups, groups.count), panel,
        panel + to_own_next(item, grain, threads) * item_panels);
  });
}

}  // namespace rbln
