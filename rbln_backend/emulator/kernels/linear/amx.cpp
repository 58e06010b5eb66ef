// x W^T + bias by tiles, for bf16.
//
// A panel, [depth/2, 16, 2], is a column of B's tiles as it lies. Activations are copied into A's
// once per call. Every number of rows is multiplied by tiles, in products of 32 depths counted from
// the first: an element's bits depend on its row and its column alone, whatever blocks they are in.
//
// A row block, whose activations take half of L2 at most, meets a few panels depth block by depth
// block, so that a block of panels stays in L1 while the rows pass. A lone group of rows (decode: the
// limit is bandwidth) runs through the whole depth at once.
#include "linear/amx.h"

#include "core/amx.h"

#if defined(RBLN_TILES)

#include <unistd.h>

#include <algorithm>

#include "core/team.h"
#include "linear/amx_tile.h"
#include "linear/output.h"

namespace rbln {
namespace {

constexpr int64_t kMaxRowBlock = 256;     // rows whose sums one work item keeps
constexpr int64_t kItemPanels = 4;
constexpr int64_t kBlockSteps = 8;        // products of 32 depths: two panels of 8 KB each
constexpr int64_t kAhead = 4096;          // bytes of a panel that a lone group prefetches ahead
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds worth less than waking the team
constexpr int64_t kClaimWork = 1 << 21;   // multiply-adds that a thread should claim at once

// The last product of a depth that does not fill it: what is missing of the panels is zero.
template <int R, int P>
void multiply_rest(const bf16* a, int rows, const bf16* const (&panels)[P], int64_t depths) {
  alignas(64) bf16 padded[P][kTileBytes / sizeof(bf16)] = {};
  const bf16* tiles[P];
  Fetch<P> nothing{};
  for (int p = 0; p < P; ++p) {
    std::copy_n(panels[p], depths * kPanel, padded[p]);
    tiles[p] = padded[p];
  }
  multiply_steps<R, P>(a, rows, tiles, 1, nothing);
}

// One work item: the groups [first, last) against kItemPanels panels from `panel` on.
struct Item {
  const LinearArgs& args;
  const TileActivations& x;
  int64_t first, last, panel;

  int64_t depth() const { return padded_depth(Dtype::bf16, args.depth); }

  const bf16* panel_at(int64_t at) const {
    const int64_t edge = (args.columns + kPanel - 1) / kPanel - 1;
    // An item that hangs over the edge reads the last panel again; write_tile drops its columns.
    return static_cast<const bf16*>(args.packed) + std::min(at, edge) * depth() * kPanel;
  }

  // One group and P panels over the steps [begin, end), the sums continued from and left in `sums`.
  template <int R, int P>
  void tile(int64_t g, int64_t at, int64_t begin, int64_t end, float* sums) const {
    constexpr int64_t kStride = P * amx::kRowBytes;
    const int rows = x.size(g);
    const bf16* panels[P];
    for (int p = 0; p < P; ++p) panels[p] = panel_at(at + p) + begin * amx::kDepth * kPanel;
    amx::unroll<R * P>([&]<int c>() __attribute__((always_inline)) {
      if (begin == 0) amx::zero<c>();
      else amx::load<c>(sums + c / P * amx::kRows * P * kPanel + c % P * kPanel, kStride);
    });
    const int64_t whole = std::min(end, depth() / amx::kDepth);
    multiply_steps<R, P>(x.group(g, begin), rows, panels, whole - begin,
                         fetch_of(panels, g - first, begin, end));
    if (whole < end) {
      for (int p = 0; p < P; ++p) panels[p] += (whole - begin) * amx::kDepth * kPanel;
      multiply_rest<R, P>(x.group(g, whole), rows, panels, depth() - whole * amx::kDepth);
    }
    amx::unroll<R * P>([&]<int c>() __attribute__((always_inline)) {
      amx::store<c>(sums + c / P * amx::kRows * P * kPanel + c % P * kPanel, kStride);
    });
    if (end == x.steps)
      write_tile<bf16>(args, g * kGroupRows, rows, at * kPanel, int(P * kPanel / kLanes), sums);
  }

  // A lone group runs ahead of itself. Several share the fetching of what comes next: the next block
  // of these panels, or the next item's first.
  template <int P>
  Fetch<P> fetch_of(const bf16* const (&panels)[P], int64_t nth, int64_t begin, int64_t end) const {
    const int64_t groups = last - first, steps = end - begin;
    const int64_t onward =
        end < x.steps ? steps * amx::kDepth : kItemPanels * depth() - begin * amx::kDepth;
    Fetch<P> fetch;
    fetch.bytes = (kTileBytes / groups + 63) / 64 * 64;
    const int64_t start = groups == 1 ? kAhead
                                      : onward * kPanel * int64_t(sizeof(bf16)) +
                                            nth * steps * fetch.bytes;
    for (int p = 0; p < P; ++p)
      fetch.address[p] = reinterpret_cast<const char*>(panels[p]) + start;
    return fetch;
  }

  void run() const {
    alignas(64) float sums[kMaxRowBlock * kItemPanels * kPanel];
    amx::Block block;
    const int64_t length = last - first == 1 ? x.steps : kBlockSteps;
    for (int64_t begin = 0; begin < x.steps; begin += length) {
      const int64_t end = std::min(begin + length, x.steps);
      for (int64_t g = first; g < last; ++g) {
        const int rows = x.size(g);
        float* partial = sums + (g - first) * kGroupRows * kItemPanels * kPanel;
        block.shape(rows);
        if (rows <= amx::kRows) {
          tile<1, 4>(g, panel, begin, end, partial);
        } else {
          tile<2, 2>(g, panel, begin, end, partial);
          tile<2, 2>(g, panel + 2, begin, end, partial + rows * 2 * kPanel);
        }
      }
    }
  }
};

// Groups whose activations take half of this core's L2, and whose sums an item can keep.
int64_t groups_at_once(int64_t steps) {
  static const int64_t l2 = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 20);
  const int64_t group_bytes = kGroupRows * steps * amx::kRowBytes;
  return std::clamp<int64_t>(l2 / 2 / group_bytes, 1, kMaxRowBlock / kGroupRows);
}

}  // namespace

void linear_by_tiles(const LinearArgs& args) {
  thread_local Buffer buffer;
  const int64_t steps = (args.depth + amx::kDepth - 1) / amx::kDepth;
  float* const memory = buffer.take(args.rows * steps * amx::kDepth / 2);
  const TileActivations x{args.rows, steps, reinterpret_cast<bf16*>(memory)};
  const int64_t panels = (args.columns + kPanel - 1) / kPanel;
  const int64_t tiles = (panels + kItemPanels - 1) / kItemPanels;
  const int64_t block_groups = groups_at_once(steps);
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
    Item{args, x, first, last, item % tiles * kItemPanels}.run();
  });
}

}  // namespace rbln

#endif
