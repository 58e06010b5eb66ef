// x W^T + bias over packed weights.
//
// A few panels are multiplied by every row group, depth block by depth block, so that a block is
// fetched from memory once and stays in the cache; weights narrower than f32 are widened in
// registers. While a block is multiplied the next one is prefetched. A single group (decode: the
// limit is bandwidth) runs through the whole depth at once.
#include "linear/linear.h"

#include <algorithm>

#include "linear/activations.h"
#include "linear/coded.h"
#include "linear/items.h"
#include "linear/output.h"

namespace rbln {
namespace {

constexpr int64_t kRowBlock = 264;        // most rows whose accumulators one work item keeps
constexpr int64_t kShortRowBlock = 192;   // the same where a team has few items
constexpr int64_t kItemPanels = 2 * kTilePanels;
constexpr int64_t kAhead = 4096;          // bytes of its panels that a lone group prefetches ahead
constexpr int64_t kAheadOfWide = 6144;    // the same of one that is not narrow

// Depths of a block. Long ones cost the fewest interruptions, while their panels fit in L2; with
// f32, whose few products per byte leave less time to fetch, short ones spread the fetching evenly.
template <class T>
inline constexpr int64_t kBlockDepth = (sizeof(T) == 4 ? 16384 : 32768) / (kPanel * sizeof(T));

// One work item: the row groups [first, last) against kItemPanels panels from `panel` on. Weights
// lie in memory as W: as T, or coded.
template <class T, class W>
struct Item {
  static constexpr bool kIsCoded = !std::is_same_v<T, W>;
  static constexpr int64_t kStepBytes = Layout<W>::kElements * sizeof(W);
  static constexpr int64_t kLineBytes = std::min<int64_t>(kStepBytes, 64);  // of a step's fetch
  const LinearArgs& args;
  const Activations<T>& x;
  int64_t first, last, panel;
  int64_t next;  // the panel of this thread's next item

  static constexpr int64_t elements(int64_t depths) {
    return depths / Layout<W>::kStep * Layout<W>::kElements;
  }

  // A tile that hangs over the edge reads the last panel again; write_tile drops its columns.
  const W* panel_at(int64_t nth, int64_t depth) const {
    const int64_t inside = std::min(nth, panels_of(args.columns) - 1);
    return static_cast<const W*>(args.packed) + elements(inside * x.depth + depth);
  }

  CodedWeight coded() const { return {args.packed, panels_of(args.columns), x.depth}; }

  Layout<W> layout() const {
    if constexpr (kIsCoded) return {{}, VecU{} + *coded().lowest};
    else return {};
  }

  // One group and P panels from `at` on over depths [begin, end): their sums, [R][P * kPanel],
  // continue where they were.
  template <int R, int P>
  __attribute__((noinline)) void tile(int64_t g, int64_t at, int64_t begin, int64_t end,
                                      const Ahead<P>& ahead, float* sums) const {
    constexpr int C = P * kPanelVectors;
    const W* panels[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) panels[p] = panel_at(at + p, begin);
    VecF acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
        acc[r][c] = begin == 0 ? VecF{} : load(sums + (r * C + c) * kLanes);
    multiply_panels<W, R, P>(panels, x.group(g, begin), end - begin, ahead, acc, layout());
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store(sums + (r * C + c) * kLanes, acc[r][c]);
    if (end < x.depth) return;
    if constexpr (kIsCoded)
      coded().template add_uncoded<R, P>(at, panels_of(args.columns), x.group(g, 0), sums);
    write_tile<T>(args, x.groups.begin(g), R, at * kPanel, C, sums);
  }

  // Groups share the fetching of what comes next: the next block of these panels, or the first of
  // this thread's next item.
  template <int P>
  Ahead<P> ahead_of(int64_t at, int64_t nth, int64_t begin, int64_t end) const {
    const int64_t onward = end < x.depth ? end - begin : (next - panel) * x.depth - begin;
    Ahead<P> ahead;
    ahead.step = kLineBytes / (last - first);
    for (int p = 0; p < P; ++p)
      ahead.address[p] = reinterpret_cast<const char*>(panel_at(at + p, begin) + elements(onward)) +
                         nth * elements(end - begin) * int64_t(sizeof(W)) / (last - first);
    return ahead;
  }

  // A lone group runs ahead of itself. Beside the last rows of a tile's panels it fetches the first
  // ones of the next tile's, so that no tile begins by waiting for memory.
  template <int R>
  void run_alone() const {
    constexpr int P = is_narrow_group(R) ? kItemPanels : kTilePanels;
    constexpr int64_t kBytes = (is_narrow_group(R) ? kAhead : kAheadOfWide) / P;  // of each panel
    alignas(64) float sums[R * P * kPanel];
    const int64_t turn = std::max<int64_t>(x.depth - kBytes / kStepBytes * Layout<W>::kStep, 0);
    for (int64_t at = panel; at < panel + kItemPanels && at * kPanel < args.columns; at += P) {
      const int64_t onward = at + P < panel + kItemPanels ? at + P : next;
      for (int64_t begin = 0, end = turn; begin < x.depth; begin = end, end = x.depth) {
        Ahead<P> ahead;
        ahead.step = kLineBytes;
        for (int p = 0; p < P; ++p)
          ahead.address[p] = reinterpret_cast<const char*>(
              end < x.depth ? panel_at(at + p, begin) + kBytes / int64_t(sizeof(W))
                            : panel_at(onward + p, 0));
        tile<R>(first, at, begin, end, ahead, sums);
      }
    }
  }

  void run() const {
    if (last - first == 1)
      return with_rows(x.groups.size(first), [&]<int R>() { run_alone<R>(); });
    alignas(64) float sums[(kRowBlock + kMaxTileRows) * 2 * kTileColumns];
    const int64_t row0 = x.groups.begin(first);
    for (int64_t begin = 0; begin < x.depth; begin += kBlockDepth<T>) {
      const int64_t end = std::min(begin + kBlockDepth<T>, x.depth);
      for (int64_t g = first; g < last; ++g) {
        float* partial = sums + (x.groups.begin(g) - row0) * 2 * kTileColumns;
        with_rows(x.groups.size(g), [&]<int R>() {
          constexpr int P = is_narrow_group(R) ? kItemPanels : kTilePanels;
          for (int64_t at = panel; at < panel + kItemPanels && at * kPanel < args.columns; at += P)
            tile<R>(g, at, begin, end, ahead_of<P>(at, g - first, begin, end),
                    partial + (at - panel) * R * kPanel);
        });
      }
    }
  }
};

template <class T, class W>
void run(const LinearArgs& args) {
  thread_local Buffer buffer;
  const int64_t depth = padded_depth(args.dtype, args.depth);
  const Activations<T> x{RowGroups(args.rows), depth, buffer.take(args.rows * depth)};
  // Each block reads all panels, so that a whole chunk of 256 rows is one, and no block is short.
  const bool has_few_items = panels_of(args.columns) < 2 * kItemPanels * team_threads();
  const int64_t most_groups = (has_few_items ? kShortRowBlock : kRowBlock) / kMaxTileRows;
  const int64_t row_blocks = (x.groups.count + most_groups - 1) / most_groups;
  const int64_t block_groups = (x.groups.count + row_blocks - 1) / row_blocks;
  for_items(
      args, x.groups, block_groups, kItemPanels,
      [&](int64_t g) { interleave_group<T>(args, x, g); },
      [&](int64_t first, int64_t last, int64_t panel, int64_t next) {
        Item<T, W>{args, x, first, last, panel, next}.run();
      });
}

template <class T>
void run_any(const LinearArgs& args) {
  if constexpr (kReadsCodes && std::is_same_v<T, bf16>)
    if (args.is_coded) return run<T, Coded>(args);
  run<T, T>(args);
}

}  // namespace

void linear(const LinearArgs& args) {
  if (args.rows == 0 || args.columns == 0) return;
  RBLN_DISPATCH(args.dtype, T, run_any<T>(args));
}

void linear_heads(const LinearArgs& first, int64_t heads, int64_t x_elements,
                  int64_t packed_elements) {
  const int64_t size = first.dtype == Dtype::f32 ? 4 : 2;
  const int threads = team_size(heads * first.rows * first.depth * first.columns, kSerialProduct);
  // Work of one thread on one head is serial.
  parallel_for(heads, 1, threads, [&](int64_t head) {
    LinearArgs args = first;
    args.x = static_cast<const char*>(first.x) + head * x_elements * size;
    args.packed = static_cast<const char*>(first.packed) + head * packed_elements * size;
    args.out = static_cast<char*>(first.out) + head * first.columns * size;
    linear(args);
  });
}

}  // namespace rbln
