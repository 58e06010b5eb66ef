// x W^T + bias over weights of 4 or 8 bits, read as they are packed; see tile.h and fields.h, and
// expanded.cpp for those that are expanded.
//
// As in linear.cpp, a few panels meet every row group, depth block by depth block, and fields are
// taken from their words anew for each group: what that costs hides behind the multiplications. The
// sums of a chunk are multiplied by their scales and added up in order, whatever rows and columns a
// tile has, and so every row has the bits it has alone.
#include "quantized/quantized.h"

#include <algorithm>
#include <utility>

#include "linear/items.h"
#include "linear/output.h"
#include "quantized/expanded.h"
#include "quantized/tile.h"

namespace rbln {
namespace {

constexpr int64_t kRowBlock = 96;         // rows whose sums one work item keeps
constexpr int64_t kBlockChunks = 8;       // chunks of a depth block
constexpr int64_t kAhead = 2048;          // bytes of a panel that the first group prefetches ahead

// Panels of a tile of `rows` rows: enough chains of sums to keep the units busy.
constexpr int tile_panels(int rows) {
  const int narrow = is_narrow_group(rows) ? 2 * kTileVectors : kTileVectors;
  const int vectors = rows == 1 && kLanes > 4 ? 8 : std::max(narrow, kPanelVectors);
  return std::min(vectors, kLanes == 4 ? kPanelVectors : 8) / kPanelVectors;
}
constexpr int kItemPanels = tile_panels(1);

// Activations as the tiles read them: per row group and chunk [Tile::kWords][rows of the group].
template <class Tile>
struct Chunks {
  RowGroups groups;
  int64_t count;
  float* data;

  float* of(int64_t g, int64_t chunk) const {
    return data + (groups.begin(g) * count + chunk * groups.size(g)) * Tile::kWords;
  }
};

template <class Tile, class T>
void prepare_group(const LinearArgs& args, const Chunks<Tile>& to, int64_t g) {
  const int size = to.groups.size(g);
  for (int r = 0; r < size; ++r) {
    const T* row = static_cast<const T*>(args.x) + (to.groups.begin(g) + r) * args.x_stride;
    for (int64_t chunk = 0; chunk < to.count; ++chunk) {
      float values[Tile::F::kChunk];
      load_chunk<typename Tile::F>(row, args.depth, chunk, values);
      Tile::prepare(values, to.of(g, chunk) + r, size);
    }
  }
}

// One work item: the row groups [first, last) against kItemPanels panels from `panel` on.
template <class Tile, class T>
struct Item {
  const QuantizedLinearArgs& args;
  const Chunks<Tile>& x;
  int64_t first, last, panel;
  uint32_t scale_rows, chunks_per_scale;

  // A tile that hangs over the edge reads the last panel again; write_tile drops its columns.
  int64_t inside(int64_t at) const {
    return std::min(at, panels_of(args.plain.columns) - 1);
  }

  // Scales of the chunks [begin, end) of the item's panels from `nth` to `past`.
  void read_groups(int nth, int past, int64_t begin, int64_t end,
                   Group<Tile, kItemPanels>* groups) const {
    const int64_t first_row = begin / chunks_per_scale;
    for (int64_t row = first_row; row <= (end - 1) / chunks_per_scale; ++row)
      for (int p = nth; p < past; ++p)
        groups[row - first_row].read(args.weight, (inside(panel + p) * scale_rows + row) * kPanel, p);
  }

  // One group and P panels from the item's `nth` on over chunks [begin, end), the sums continued from
  // and left in `totals`.
  template <int R, int P>
  void tile(int64_t g, int64_t nth, int64_t begin, int64_t end,
            const Group<Tile, kItemPanels>* groups, float* totals) const {
    constexpr int64_t kFields = Tile::F::kCount, kChunk = Tile::F::kChunk;
    constexpr int64_t kWords = kChunk / kFields * kPanel;
    if (begin == 0) std::fill_n(totals, R * P * kPanel, 0.0f);
    const Packed<Tile>* words[P];
    Ahead<P> ahead;
    ahead.step = kPanel * sizeof(uint32_t);
    for (int p = 0; p < P; ++p) {
      words[p] = reinterpret_cast<const Packed<Tile>*>(args.weight.words) + begin * kWords;
      words[p] += inside(panel + nth + p) * (args.plain.depth / kFields) * kPanel;
      // The words come from memory for the first group alone.
      ahead.address[p] = reinterpret_cast<const char*>(words[p]) + (g == first ? kAhead : 0);
    }
    const float* a = x.of(g, begin);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const auto& group = groups[chunk / chunks_per_scale - begin / chunks_per_scale];
      const int64_t depths = std::min(kChunk, args.plain.depth - chunk * kChunk);
      multiply_chunk<Tile, R, P>(words, a, group.scales + nth * kPanel,
                                 group.offsets + nth * kPanel, depths, ahead, totals);
      a += R * Tile::kWords;
      for (int p = 0; p < P; ++p) {
        words[p] += kWords;
        ahead.address[p] += kWords * int64_t(sizeof(uint32_t));
      }
    }
    if (end == x.count)
      write_tile<T>(args.plain, x.groups.begin(g), R, (panel + nth) * kPanel, P * kPanelVectors,
                    totals);
  }

  // All groups over the item's panels from `nth` to `past`, depth block by depth block.
  void run_panels(int nth, int past) const {
    alignas(64) float totals[(kRowBlock + kMaxTileRows) * kItemPanels * kPanel];
    Group<Tile, kItemPanels> groups[kBlockChunks];
    const int64_t row0 = x.groups.begin(first);
    for (int64_t begin = 0; begin < x.count; begin += kBlockChunks) {
      const int64_t end = std::min(begin + kBlockChunks, x.count);
      read_groups(nth, past, begin, end, groups);
      for (int64_t g = first; g < last; ++g) {
        float* partial = totals + (x.groups.begin(g) - row0) * kItemPanels * kPanel;
        with_rows(x.groups.size(g), [&]<int R>() {
          constexpr int P = tile_panels(R);
          for (int p = nth; p < past; p += P)
            tile<R, P>(g, p, begin, end, groups, partial + p * R * kPanel);
        });
      }
    }
  }

  // Several groups share a block while it is near; a lone one reads its panels from end to end.
  void run() const {
    const int together = last - first == 1 ? tile_panels(x.groups.size(first)) : kItemPanels;
    for (int p = 0; p < kItemPanels; p += together) run_panels(p, p + together);
  }
};

template <class Tile, class T>
void run(const QuantizedLinearArgs& args) {
  thread_local Buffer buffer;
  constexpr int64_t kChunk = Tile::F::kChunk;
  const LinearArgs& plain = args.plain;
  const int64_t count = (plain.depth + kChunk - 1) / kChunk;
  float* const data = buffer.take(plain.rows * count * Tile::kWords);
  const Chunks<Tile> x{RowGroups(plain.rows), count, data};
  const auto scale_rows = uint32_t(plain.depth / args.weight.group);
  const auto per_scale = uint32_t((args.weight.group + kChunk - 1) / kChunk);
  for_items(
      plain, x.groups, kRowBlock / kMaxTileRows, kItemPanels,
      [&](int64_t g) { prepare_group<Tile, T>(plain, x, g); },
      [&](int64_t first, int64_t last, int64_t panel, int64_t) {
        Item<Tile, T>{args, x, first, last, panel, scale_rows, per_scale}.run();
      });
}

// Activations of 16 bits lose nothing to speak of by ShortTile.
template <class Decoder>
void run_any(const QuantizedLinearArgs& args) {
  RBLN_DISPATCH(args.plain.dtype, T, {
    using Tile = std::conditional_t<sizeof(T) == 4, FloatTile<Decoder>, ShortTile<Decoder>>;
    run<Tile, T>(args);
  });
}

}  // namespace

void quantized_linear(const QuantizedLinearArgs& args) {
  if (args.plain.rows == 0 || args.plain.columns == 0) return;
  switch (args.weight.format) {
    case Format::int4: return run_any<Integers<4>>(args);
    case Format::int8: return run_any<Integers<8>>(args);
    case Format::e2m1: return run_any<E2m1>(args);
    case Format::e4m3:
    case Format::blocks8: return expanded_linear(args);
  }
}

}  // namespace rbln
