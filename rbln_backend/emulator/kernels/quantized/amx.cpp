// The product of quantized.cpp by tiles, for fields that are whole numbers and many rows.
//
// Its numbers of 16 bits are taken as two bytes each, and every sum of a chunk is a whole number that
// both ways have exactly: the bits are the same, so that the number of rows decides the way.
#include "quantized/amx.h"

#include "core/amx.h"

#if defined(RBLN_TILES)

#include "core/team.h"
#include "linear/output.h"
#include "quantized/tile.h"

namespace rbln {
namespace {

constexpr int64_t kRowBlock = 256;        // rows whose totals one work item keeps
constexpr int kItemPanels = 2;
constexpr int64_t kBlockChunks = 8;       // chunks of a depth block: two panels of 8 KB each
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds worth less than waking the team
constexpr int64_t kClaimWork = 1 << 21;   // multiply-adds that a thread should claim at once
constexpr int64_t kTileBytes = amx::kRows * amx::kRowBytes;

// A tile of B has four depths in a word: the fields of a word of weights, or every second one of
// them. A's bytes lie in the same order.
template <class F>
constexpr int place_of(int depth) {
  constexpr int kQuads = F::kCount / 4;
  const int word = depth / F::kCount, field = depth % F::kCount;
  return (word * kQuads + field % kQuads) * 4 + field / kQuads;
}

// Activations as A's tiles: per group of 16 rows and chunk what its sums begin with and are divided
// by, then the upper bytes, then the lower ones, [rows of the group][64] each.
struct Activations {
  static constexpr int64_t kRowBytes = 2 * sizeof(float) + 2 * amx::kRowBytes;
  int64_t rows, chunks;
  char* data;

  static int64_t bytes(int64_t rows, int64_t chunks) {
    return (rows + amx::kRows - 1) / amx::kRows * amx::kRows * chunks * kRowBytes;
  }
  int64_t groups() const { return (rows + amx::kRows - 1) / amx::kRows; }
  int size(int64_t g) const { return int(std::min<int64_t>(amx::kRows, rows - g * amx::kRows)); }
  char* chunk(int64_t g, int64_t c) const {
    return data + (g * chunks + c) * amx::kRows * kRowBytes;
  }
  int8_t* upper(int64_t g, int64_t c) const { return reinterpret_cast<int8_t*>(chunk(g, c)); }
  uint8_t* lower(int64_t g, int64_t c) const {
    return reinterpret_cast<uint8_t*>(chunk(g, c) + kTileBytes);
  }
  float* heads(int64_t g, int64_t c) const {
    return reinterpret_cast<float*>(chunk(g, c) + 2 * kTileBytes);
  }
};

template <class F, class T>
void arrange_group(const LinearArgs& args, const Activations& to, int64_t g) {
  for (int r = 0; r < to.size(g); ++r) {
    const T* row = static_cast<const T*>(args.x) + (g * amx::kRows + r) * args.x_stride;
    for (int64_t c = 0; c < to.chunks; ++c) {
      float values[F::kChunk];
      load_chunk<F>(row, args.depth, c, values);
      const WholeNumbers<F> numbers(values);
      int8_t* upper = to.upper(g, c) + r * amx::kRowBytes;
      uint8_t* lower = to.lower(g, c) + r * amx::kRowBytes;
      std::fill_n(upper, amx::kRowBytes, int8_t{0});
      std::fill_n(lower, amx::kRowBytes, uint8_t{0});
      for (int t = 0; t < F::kChunk; ++t) {
        upper[place_of<F>(t)] = int8_t(numbers.of[t] >> 8);
        lower[place_of<F>(t)] = uint8_t(numbers.of[t]);
      }
      to.heads(g, c)[r] = ShortTile<F>::head(numbers.total);
      to.heads(g, c)[amx::kRows + r] = numbers.back;
    }
  }
}

// One work item: the groups [first, last) against kItemPanels panels from `panel` on.
template <class F, class T>
struct Item {
  const QuantizedLinearArgs& args;
  const Activations& x;
  int64_t first, last, panel;

  int64_t scale_rows() const { return args.plain.depth / args.weight.group; }
  int64_t scale_row(int64_t chunk) const { return chunk * F::kChunk / args.weight.group; }

  // An item that hangs over the edge reads the last panel again; write_tile drops its columns.
  int64_t inside(int64_t at) const {
    return std::min(at, (args.plain.columns + kPanel - 1) / kPanel - 1);
  }

  // The chunks [begin, end) of a panel as B's tiles; past a chunk or the depth they are zero.
  void expand(int64_t at, int64_t begin, int64_t end, uint32_t* tiles) const {
    constexpr int kQuads = F::kCount / 4;
    constexpr int64_t kRows = F::kChunk / F::kCount;  // of words per chunk
    const int64_t all = args.plain.depth / F::kCount;
    const uint32_t* words = args.weight.words + at * all * kPanel;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      uint32_t* to = tiles + (chunk - begin) * kTileBytes / int64_t(sizeof(uint32_t));
      const int64_t rows = std::min(kRows, all - chunk * kRows);
      for (int64_t w = 0; w < rows; ++w)
        for (int64_t c = 0; c < kPanel; c += kLanes)
          amx::unroll<kQuads>([&]<int q>() __attribute__((always_inline)) {
            const auto word = load_raw<VecU>(words + (chunk * kRows + w) * kPanel + c);
            store_raw(to + (w * kQuads + q) * kPanel + c, F::template quads<q>(word));
          });
      std::fill(to + rows * kQuads * kPanel, to + amx::kRows * kPanel, 0u);
    }
  }

  void begin_group(int64_t chunk, Group<ShortTile<F>, kItemPanels>& group) const {
    for (int p = 0; p < kItemPanels; ++p)
      group.read(args.weight, (inside(panel + p) * scale_rows() + scale_row(chunk)) * kPanel, p);
  }

  // One chunk of a group: what tile.h has as multiply_chunk.
  void multiply(int64_t g, int64_t chunk, const uint32_t* const (&tiles)[kItemPanels],
                const Group<ShortTile<F>, kItemPanels>& group, float* totals) const {
    alignas(64) int32_t sums[2][amx::kRows][kItemPanels * kPanel];
    constexpr int64_t kStride = sizeof(sums[0][0]);
    amx::unroll<4>([]<int c>() __attribute__((always_inline)) { amx::zero<c>(); });
    amx::load<4>(x.upper(g, chunk), amx::kRowBytes);
    amx::load<5>(x.lower(g, chunk), amx::kRowBytes);
    amx::unroll<kItemPanels>([&]<int p>() __attribute__((always_inline)) {
      amx::load<6 + p>(tiles[p], amx::kRowBytes);
      amx::multiply_signed<p, 4, 6 + p>();
      amx::multiply_unsigned<2 + p, 5, 6 + p>();
    });
    amx::unroll<kItemPanels>([&]<int p>() __attribute__((always_inline)) {
      amx::store<p>(sums[0][0] + p * kPanel, kStride);
      amx::store<2 + p>(sums[1][0] + p * kPanel, kStride);
    });
    const float* heads = x.heads(g, chunk);
    for (int r = 0; r < x.size(g); ++r) {
      for (int64_t c = 0; c < kItemPanels * kPanel; c += kLanes) {
        const VecI start = ShortTile<F>::start(heads + r, load_raw<VecI>(group.offsets + c));
        const VecI sum =
            start + (load_raw<VecI>(sums[0][r] + c) << 8) + load_raw<VecI>(sums[1][r] + c);
        float* total = totals + r * kItemPanels * kPanel + c;
        store(total, ShortTile<F>::finish(heads + r, amx::kRows, load(group.scales + c), sum,
                                          load(total)));
      }
    }
  }

  void run() const {
    alignas(64) float totals[kRowBlock * kItemPanels * kPanel];
    alignas(64) uint32_t tiles[kItemPanels][kBlockChunks * kTileBytes / sizeof(uint32_t)];
    Group<ShortTile<F>, kItemPanels> group;
    std::fill_n(totals, (last - first) * amx::kRows * kItemPanels * kPanel, 0.0f);
    amx::Block block;
    for (int64_t begin = 0; begin < x.chunks; begin += kBlockChunks) {
      const int64_t end = std::min(begin + kBlockChunks, x.chunks);
      for (int64_t p = 0; p < kItemPanels; ++p) expand(inside(panel + p), begin, end, tiles[p]);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t place = (chunk - begin) * kTileBytes / int64_t(sizeof(uint32_t));
        if (chunk == begin || scale_row(chunk) != scale_row(chunk - 1)) begin_group(chunk, group);
        for (int64_t g = first; g < last; ++g) {
          block.shape(x.size(g));
          multiply(g, chunk, {tiles[0] + place, tiles[1] + place}, group,
                   totals + (g - first) * amx::kRows * kItemPanels * kPanel);
        }
      }
    }
    for (int64_t g = first; g < last; ++g)
      write_tile<T>(args.plain, g * amx::kRows, x.size(g), panel * kPanel,
                    int(kItemPanels * kPanel / kLanes),
                    totals + (g - first) * amx::kRows * kItemPanels * kPanel);
  }
};

template <class F, class T>
void run(const QuantizedLinearArgs& args) {
  thread_local Buffer buffer;
  const LinearArgs& plain = args.plain;
  const int64_t chunks = (plain.depth + F::kChunk - 1) / F::kChunk;
  float* const memory = buffer.take(Activations::bytes(plain.rows, chunks) / int64_t(sizeof(float)));
  const Activations x{plain.rows, chunks, reinterpret_cast<char*>(memory)};
  const int64_t panels = (plain.columns + kPanel - 1) / kPanel;
  const int64_t tiles = (panels + kItemPanels - 1) / kItemPanels;
  const int64_t block_groups = kRowBlock / amx::kRows;
  const int64_t row_blocks = (x.groups() + block_groups - 1) / block_groups;
  const int threads = team_size(plain.rows * plain.depth * plain.columns, kSerialWork);
  const bool is_small = plain.rows * plain.depth < (1 << 14);
  parallel_for(x.groups(), 1, is_small ? 1 : threads,
               [&](int64_t g) { arrange_group<F, T>(plain, x, g); });
  const int64_t item_work = std::min(plain.rows, kRowBlock) * plain.depth * kItemPanels * kPanel;
  const int64_t grain = std::clamp<int64_t>(kClaimWork / item_work, 1, 4);
  parallel_for(row_blocks * tiles, grain, threads, [&](int64_t item) {
    const int64_t first = item / tiles * block_groups;
    const int64_t last = std::min(first + block_groups, x.groups());
    Item<F, T>{args, x, first, last, item % tiles * kItemPanels}.run();
  });
}

template <class F>
void run_any(const QuantizedLinearArgs& args) {
  if (args.plain.dtype == Dtype::bf16) run<F, bf16>(args);
  else run<F, f16>(args);
}

}  // namespace

void quantized_linear_by_tiles(const QuantizedLinearArgs& args) {
  if (args.weight.format == Format::int4) run_any<Integers<4>>(args);
  else if (args.weight.format == Format::int8) run_any<Integers<8>>(args);
  else run_any<E2m1>(args);
}

}  // namespace rbln

#endif
