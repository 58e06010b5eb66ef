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

#include "linear/amx_items.h"

namespace rbln {
namespace {

constexpr int64_t kBlockSteps = 8;  // products of 32 depths: two panels of 8 KB each

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

struct Item : TileItem {
  const LinearArgs& args;

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
                         fetch(g, panels, end - begin, kTileBytes, onward(begin, end)));
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

  // To the next block of these panels, or the first of this thread's next item.
  int64_t onward(int64_t begin, int64_t end) const {
    const int64_t depths = end < x.steps ? (end - begin) * amx::kDepth
                                         : (next - panel) * depth() - begin * amx::kDepth;
    return depths * kPanel * int64_t(sizeof(bf16));
  }

  void run() const {
    alignas(64) float sums[kMaxRowBlock * kItemPanels * kPanel];
    amx::Block block;
    const int64_t length = last - first == 1 ? x.steps : kBlockSteps;
    for (int64_t begin = 0; begin < x.steps; begin += length) {
      const int64_t end = std::min(begin + length, x.steps);
      for_each_tile(block, sums, [&]<int R, int P>(int64_t g, int64_t nth, float* partial) {
        tile<R, P>(g, panel + nth, begin, end, partial);
      });
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
  for_each_item(args, groups_at_once(steps_of(args)),
                [&](const TileItem& item) { Item{item, args}.run(); });
}

}  // namespace rbln

#endif
