// x W^T + bias over packed weights.
//
// A tile of panels is multiplied by every row group, depth block by depth block, so that a block is
// fetched from memory once and stays in L1; weights narrower than f32 are widened in registers.
// While a block is multiplied the next one is prefetched. A single group (decode: the limit is
// bandwidth) runs through the whole depth at once.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "tile.h"

namespace rbln {
namespace {

constexpr int64_t kDepthBlock = 256;      // depth rows of a panel: at most half of a small L1
constexpr int64_t kRowBlock = 192;        // rows whose accumulators one work item keeps
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds worth less than waking the team
constexpr int64_t kAhead = 4096;          // bytes a lone group prefetches ahead of its use

// Activations as the tiles read them: per row group [words][rows of the group], where a word is a
// depth row widened to f32, or a bf16 pair where pairs are multiplied.
template <class T>
struct Activations {
  static constexpr int kWordDepth = Layout<T>::kStep / Layout<T>::kProducts;
  RowGroups groups;
  int64_t depth;  // padded to whole steps
  float* data;

  float* group(int64_t g, int64_t t) const {
    return data + groups.begin(g) * (depth / kWordDepth) + t / kWordDepth * groups.size(g);
  }
};

template <class T>
void interleave_group(const LinearArgs& args, const Activations<T>& to, int64_t g) {
  constexpr int kWordDepth = Activations<T>::kWordDepth;
  const int size = to.groups.size(g);
  float* target = to.group(g, 0);
  for (int r = 0; r < size; ++r) {
    const T* row = static_cast<const T*>(args.x) + (to.groups.begin(g) + r) * args.x_stride;
    for (int64_t t = 0; t < to.depth; t += kLanes * kWordDepth) {
      float words[kLanes];
      T padded[kLanes * kWordDepth] = {};
      const int64_t inside = std::min<int64_t>(kLanes * kWordDepth, args.depth - t);
      const T* source = row + t;
      if (inside < kLanes * kWordDepth) {
        std::copy_n(source, std::max<int64_t>(inside, 0), padded);
        source = padded;
      }
      store(words, kWordDepth == 1 ? load(source) : load_raw<VecF>(source));
      const int64_t count = std::min<int64_t>(kLanes, (to.depth - t) / kWordDepth);
      for (int64_t i = 0; i < count; ++i) target[(t / kWordDepth + i) * size + r] = words[i];
    }
  }
}

// Finished sums, [rows][vectors * kLanes], to the output: bias, rounding, the edge's columns.
template <class T>
void write_tile(const LinearArgs& args, int64_t row, int rows, int64_t column, int vectors,
                const float* sums) {
  for (int c = 0; c < vectors; ++c) {
    const int64_t first = column + c * kLanes;
    const int64_t count = std::min<int64_t>(kLanes, args.columns - first);
    if (count <= 0) return;
    const VecF bias = args.bias == nullptr
                          ? VecF{}
                          : load_some(static_cast<const T*>(args.bias) + first, count);
    for (int r = 0; r < rows; ++r) {
      const VecF sum = load(sums + (r * vectors + c) * kLanes);
      const VecF value = args.bias == nullptr ? sum : sum + bias;
      store_some(static_cast<T*>(args.out) + (row + r) * args.columns + first, value, count);
    }
  }
}

template <class T>
const T* panel_at(const LinearArgs& args, int64_t depth, int64_t panel) {
  const int64_t last = (args.columns + kPanel - 1) / kPanel - 1;
  // A tile that hangs over the edge reads the last panel again; write_tile drops its columns.
  return static_cast<const T*>(args.packed) + std::min(panel, last) * depth * kPanel;
}

// One group over one depth block: its sums, [R][P * kPanel], continue where they were.
template <class T, int R, int P>
__attribute__((noinline)) void continue_sums(const T* (&panels)[P], const float* a, int64_t depths,
                                             const Ahead<P>& ahead, bool is_first, float* sums) {
  constexpr int C = P * kPanelVectors;
  VecF acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      acc[r][c] = is_first ? VecF{} : load(sums + (r * C + c) * kLanes);
  multiply_panels<T, R, P>(panels, a, depths, ahead, acc);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + (r * C + c) * kLanes, acc[r][c]);
}

// One work item: the row groups [first, last) against the tile of panels at `panel`.
template <class T>
struct Item {
  const LinearArgs& args;
  const Activations<T>& x;
  int64_t first, last, panel;

  // One group over depths [begin, end), its sums continued from and left in `sums`.
  template <int R, int P>
  void tile(int64_t g, int64_t begin, int64_t end, float* sums) const {
    constexpr int64_t kStepBytes = Layout<T>::kStep * kPanel * int64_t(sizeof(T));
    const int64_t groups = last - first, block = end - begin;
    const T* panels[P];
    Ahead<P> ahead;
    ahead.step = kStepBytes / groups;
    for (int p = 0; p < P; ++p) {
      panels[p] = panel_at<T>(args, x.depth, panel + p) + begin * kPanel;
      // A lone group runs ahead of itself, several share the fetching of the next block.
      const auto* here = reinterpret_cast<const char*>(panels[p]);
      ahead.address[p] = groups == 1 ? here + kAhead
                                     : here + block * kPanel * int64_t(sizeof(T)) +
                                           (g - first) * ahead.step * block / Layout<T>::kStep;
    }
    continue_sums<T, R, P>(panels, x.group(g, begin), block, ahead, begin == 0, sums);
    if (end == x.depth)
      write_tile<T>(args, x.groups.begin(g), R, panel * kPanel, P * kPanelVectors, sums);
  }

  void run(bool wide) const {
    alignas(64) float sums[(kRowBlock + kMaxTileRows) * kTileColumns];
    const int64_t row0 = x.groups.begin(first);
    const int64_t block = last - first == 1 ? x.depth : kDepthBlock;
    for (int64_t begin = 0; begin < x.depth; begin += block) {
      const int64_t end = std::min(begin + block, x.depth);
      for (int64_t g = first; g < last; ++g) {
        float* partial = sums + (x.groups.begin(g) - row0) * kTileColumns;
        with_rows(x.groups.size(g), [&]<int R>() {
          // Few rows leave registers free for more panels: more independent chains, more loads.
          if constexpr (is_narrow_group(R)) {
            if (wide) return tile<R, 2 * kTilePanels>(g, begin, end, partial);
          }
          tile<R, kTilePanels>(g, begin, end, partial);
        });
      }
    }
  }
};

struct Buffer {
  std::vector<float> memory;
  float* take(int64_t count) {
    if (int64_t(memory.size()) < count + 16) memory.resize(size_t(count + 16));
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((address + 63) / 64 * 64);
  }
};

template <class T>
void run(const LinearArgs& args) {
  thread_local Buffer buffer;
  const int64_t depth = padded_depth(args.dtype, args.depth);
  const Activations<T> x{RowGroups(args.rows), depth, buffer.take(args.rows * depth)};
  const int64_t panels = (args.columns + kPanel - 1) / kPanel;
  const bool wide = x.groups.count == 1 && is_narrow_group(x.groups.size(0));
  const int64_t width = wide ? 2 * kTilePanels : kTilePanels;
  const int64_t tiles = (panels + width - 1) / width;
  const int64_t block_groups = kRowBlock / kMaxTileRows;
  const int64_t row_blocks = (x.groups.count + block_groups - 1) / block_groups;
  const int threads = team_size(args.rows * depth * args.columns, kSerialWork);
  const bool serial_interleave = args.rows * depth < (1 << 14);
  if (serial_interleave)
    for (int64_t g = 0; g < x.groups.count; ++g) interleave_group<T>(args, x, g);
  if (!serial_interleave)
    parallel_for(x.groups.count, 1, threads, [&](int64_t g) { interleave_group<T>(args, x, g); });
  parallel_for(row_blocks * tiles, 4, threads, [&](int64_t item) {
    const int64_t first = item / tiles * block_groups;
    const int64_t last = std::min(first + block_groups, x.groups.count);
    Item<T>{args, x, first, last, item % tiles * width}.run(wide);
  });
}

}  // namespace

void linear(const LinearArgs& args) {
  if (args.rows == 0 || args.columns == 0) return;
  RBLN_DISPATCH(args.dtype, T, run<T>(args));
}

}  // namespace rbln
