// Causal attention over the paged KV cache: writes the new keys and values, then attends.
//
// One work item is a KV head with all its query heads and a run of query tokens. It walks the keys
// in tiles of kKeys aligned to absolute positions, with an online softmax, so a query's result
// depends on its position and the cache alone: not on the chunk, its row in it, or the batch.
// Masked keys are left out, never multiplied by zero: what lies beyond a row's position may be NaN.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "tile.h"
#include "transpose.h"

namespace rbln {
namespace {

constexpr int64_t kKeys = 64;        // key positions per tile
constexpr int64_t kQueryRows = 72;   // query rows (tokens x group) an item aims at
constexpr int64_t kSerialWork = 1 << 18;  // multiply-adds worth less than waking the team

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct Scratch {
  std::vector<float> memory;
  std::vector<int64_t> limits;  // per query row: how many keys it sees
  float *queries, *keys, *values, *scores, *sums, *maxima, *totals, *factors;

  void reserve(int64_t rows, int64_t depth, int64_t width) {
    const int64_t sizes[] = {rows * depth, kKeys * depth, kKeys * width, rows * kKeys,
                             rows * width, rows,          rows,          rows};
    float** parts[] = {&queries, &keys, &values, &scores, &sums, &maxima, &totals, &factors};
    int64_t total = 16;
    for (int64_t size : sizes) total += round_up(size, 16);
    if (int64_t(memory.size()) < total) memory.resize(size_t(total));
    limits.resize(size_t(rows));
    auto* next = reinterpret_cast<float*>(
        round_up(int64_t(reinterpret_cast<intptr_t>(memory.data())), 64));
    for (int i = 0; i < 8; ++i) {
      *parts[i] = next;
      next += round_up(sizes[i], 16);
    }
  }
};

// The two products of a tile are functions of their own: inlined, their loops lose the registers
// to everything around them.

// scores[r * kKeys + key] = scale * (query r . key) for P panels of keys.
template <int R, int P>
__attribute__((noinline)) void score_tile(int64_t depth, const float* queries, const float* keys,
                                          float scale, const char* ahead, int64_t panel_bytes,
                                          int64_t element_bytes, float* scores) {
  VecF acc[R][P * kPanelVectors] = {};
  const float* panels[P];
  Ahead<P> fetch;
  fetch.step = kPanel * element_bytes;
  for (int p = 0; p < P; ++p) {
    panels[p] = keys + p * kPanel * depth;
    fetch.address[p] = ahead + p * panel_bytes;
  }
  multiply_panels<float, R, P>(panels, queries, depth, fetch, acc);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < P * kPanelVectors; ++c)
      store(scores + r * kKeys + c * kLanes, acc[r][c] * scale);
}

// sums[r] = sums[r] * factors[r] + weights[r] . values, over C vectors of columns.
template <class T, int R, int C>
__attribute__((noinline)) void weigh_tile(int64_t keys, const float* weights, const T* values,
                                          int64_t value_stride, const char* ahead,
                                          const float* factors, float* sums, int64_t sum_stride) {
  VecF acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      acc[r][c] = load(sums + r * sum_stride + c * kLanes);
      if (factors != nullptr) acc[r][c] *= factors[r];
    }
  multiply_rows<T, R, C, kKeys>(keys, weights, values, value_stride, ahead, acc);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + r * sum_stride + c * kLanes, acc[r][c]);
}

template <class T>
class Item {
 public:
  Item(const AttentionArgs& args, Scratch& scratch, int64_t batch, int64_t head, int64_t first,
       int64_t tokens)
      : args_(args), s_(scratch), batch_(batch), head_(head), first_(first),
        groups_(tokens * args.group), width_(round_up(args.head_size, kTileColumns)),
        reach_(args.table_width * args.block_size) {
    s_.reserve(groups_.rows, args.head_size, width_);
  }

  void run() {
    for (int64_t row = 0; row < groups_.rows; ++row)
      s_.limits[size_t(row)] =
          std::min(args_.starts[batch_] + first_ + row / args_.group + 1, reach_);
    load_queries();
    std::fill_n(s_.sums, groups_.rows * width_, 0.0f);
    std::fill_n(s_.totals, groups_.rows, 0.0f);
    std::fill_n(s_.maxima, groups_.rows, -std::numeric_limits<float>::infinity());
    const int64_t keys = limit(groups_.rows - 1);
    for (int64_t begin = 0; begin < keys; begin += kKeys) attend_tile(begin, keys);
    write_rows();
  }

 private:
  // Keys that a row sees: its own position and everything before it.
  int64_t limit(int64_t row) const { return s_.limits[size_t(row)]; }

  const T* block_row(int64_t page, int64_t slot) const {
    return static_cast<const T*>(args_.cache) +
           args_.tables[batch_ * args_.table_width + page] * args_.cache_stride.block +
           head_ * args_.cache_stride.head + slot * args_.cache_stride.slot;
  }

  void load_queries() {
    for (int64_t g = 0; g < groups_.count; ++g) {
      const int size = groups_.size(g);
      float* target = s_.queries + groups_.begin(g) * args_.head_size;
      for (int r = 0; r < size; ++r) {
        const int64_t row = groups_.begin(g) + r;
        const T* q = static_cast<const T*>(args_.q) + batch_ * args_.q_stride.batch +
                     head_ * args_.q_stride.head + row % args_.group * args_.q_stride.group +
                     (first_ + row / args_.group) * args_.q_stride.token;
        for (int64_t d = 0; d < args_.head_size; ++d) target[d * size + r] = to_float(q[d]);
      }
    }
  }

  // Keys become f32 columns in panels; columns past `count` repeat the last key. Values are read
  // where they lie if few rows use them; else, or where a tile crosses blocks or a row is not made
  // of whole vectors, they are copied as f32.
  void load_tile(int64_t begin, int64_t count) {
    const T* rows[kKeys];
    int64_t page = begin / args_.block_size, slot = begin % args_.block_size;
    in_place_ = slot + count <= args_.block_size && width_ == args_.head_size &&
                (groups_.count <= 2 || sizeof(T) == sizeof(float));
    rows[0] = block_row(page, slot);
    values_ = rows[0] + args_.cache_stride.kv;
    for (int64_t i = 1; i < count; ++i) {
      const bool turn = ++slot == args_.block_size;
      if (turn) slot = 0;
      rows[i] = turn ? block_row(++page, 0) : rows[i - 1] + args_.cache_stride.slot;
    }
    std::fill(rows + count, rows + kKeys, rows[count - 1]);
    const bool turn = ++slot == args_.block_size && page + 1 < args_.table_width;
    next_keys_ = reinterpret_cast<const char*>(turn ? block_row(page + 1, 0) : rows[count - 1]);
    for (int64_t i = 0; i < count; i += 8)
      transpose_keys(rows + i, args_.head_size,
                     s_.keys + i / kPanel * kPanel * args_.head_size + i % kPanel);
    if (in_place_) return;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; d < args_.head_size; d += kLanes)
        store(s_.values + i * width_ + d,
              load_some(rows[i] + args_.cache_stride.kv + d,
                        std::min<int64_t>(kLanes, args_.head_size - d)));
  }

  void attend_tile(int64_t begin, int64_t keys) {
    const int64_t count = std::min(kKeys, keys - begin);
    load_tile(begin, count);
    for (int64_t g = 0; g < groups_.count; ++g) {
      if (limit(groups_.begin(g) + groups_.size(g) - 1) <= begin) continue;
      with_rows(groups_.size(g), [&]<int R>() { attend_group<R>(g, begin, count); });
    }
  }

  template <int R>
  void attend_group(int64_t g, int64_t begin, int64_t count) {
    const int64_t row0 = groups_.begin(g);
    score<R>(row0, count);
    softmax<R>(row0, begin);
    // Keys that every row of the group sees, then each row's own few more.
    const int64_t shared = std::clamp<int64_t>(limit(row0) - begin, 0, kKeys);
    int64_t d = 0;
    if constexpr (is_narrow_group(R))
      for (; d + 2 * kTileColumns <= width_; d += 2 * kTileColumns)
        weigh<R, 2 * kTileVectors>(row0, d, 0, shared, s_.factors + row0);
    for (; d < width_; d += kTileColumns) weigh<R, kTileVectors>(row0, d, 0, shared, s_.factors + row0);
    for (int r = 1; r < R; ++r) {
      const int64_t own = std::min(kKeys, limit(row0 + r) - begin);
      if (own <= shared) continue;
      for (d = 0; d < width_; d += kTileColumns)
        weigh<1, kTileVectors>(row0 + r, d, shared, own, nullptr);
    }
  }

  template <int R>
  void score(int64_t row0, int64_t count) {
    int64_t key = 0;
    if constexpr (is_narrow_group(R))
      for (; key + kTileColumns < count; key += 2 * kTileColumns)
        score_panels<R, 2 * kTilePanels>(row0, key);
    for (; key < count; key += kTileColumns) score_panels<R, kTilePanels>(row0, key);
  }

  template <int R, int P>
  void score_panels(int64_t row0, int64_t key) {
    const int64_t depth = args_.head_size, slot = args_.cache_stride.slot;
    // The values of a panel's keys arrive while its scores are computed.
    score_tile<R, P>(depth, s_.queries + row0 * depth, s_.keys + key * depth, args_.scale,
                     reinterpret_cast<const char*>(values_ + key * slot),
                     slot * kPanel * int64_t(sizeof(T)), int64_t(sizeof(T)),
                     s_.scores + row0 * kKeys + key);
  }

  // Scores to weights against the running maxima. Step by step for all rows of the group, so that
  // the latency of one row's reduction hides behind the next row's.
  template <int R>
  void softmax(int64_t row0, int64_t begin) {
    for (int r = 0; r < R; ++r) find_maximum(row0 + r, limit(row0 + r) - begin);
    static_assert(kMaxTileRows <= kLanes);
    float* factors = s_.factors + row0;
    store_some(factors, exp_nonpositive(load_some(factors, R)), R);
    for (int r = 0; r < R; ++r) weigh_scores(row0 + r, std::min(kKeys, limit(row0 + r) - begin));
  }

  // Leaves the logarithm of the row's rescaling factor: 0 where it sees nothing of the tile.
  void find_maximum(int64_t row, int64_t count) {
    s_.factors[row] = 0.0f;
    if (count <= 0) return;
    float* scores = s_.scores + row * kKeys;
    if (count < kKeys)
      std::fill(scores + count, scores + kKeys, -std::numeric_limits<float>::infinity());
    VecF largest = load(scores);
    for (int64_t i = kLanes; i < kKeys; i += kLanes) largest = max(largest, load(scores + i));
    const float maximum = std::max(s_.maxima[row], reduce_max(largest));
    s_.factors[row] = s_.maxima[row] - maximum;
    s_.maxima[row] = maximum;
  }

  void weigh_scores(int64_t row, int64_t count) {
    float* scores = s_.scores + row * kKeys;
    VecF sum = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const VecF weight = exp_nonpositive(load(scores + i) - s_.maxima[row]);
      store(scores + i, weight);
      sum += weight;
    }
    s_.totals[row] = s_.totals[row] * s_.factors[row] + reduce_sum(sum);
  }

  template <int R, int C>
  void weigh(int64_t row0, int64_t d, int64_t from, int64_t to, const float* factors) {
    const float* weights = s_.scores + row0 * kKeys + from;
    float* sums = s_.sums + row0 * width_ + d;
    const char* ahead = next_keys_ + d * kKeys * int64_t(sizeof(T));
    if (in_place_) {
      const int64_t slot = args_.cache_stride.slot;
      weigh_tile<T, R, C>(to - from, weights, values_ + from * slot + d, slot, ahead, factors,
                          sums, width_);
    } else {
      weigh_tile<float, R, C>(to - from, weights, s_.values + from * width_ + d, width_, ahead,
                              factors, sums, width_);
    }
  }

  // A sink is one more logit in the denominator.
  void write_rows() {
    for (int64_t row = 0; row < groups_.rows; ++row) {
      const int64_t member = row % args_.group, token = first_ + row / args_.group;
      float factor = 1.0f, total = s_.totals[row];
      if (args_.sinks != nullptr) {
        const float sink = args_.sinks[head_ * args_.group + member];
        const float maximum = std::max(s_.maxima[row], sink);
        factor = exp_nonpositive(broadcast(s_.maxima[row] - maximum))[0];
        total = total * factor + exp_nonpositive(broadcast(sink - maximum))[0];
      }
      T* out = static_cast<T*>(args_.out) +
               (((batch_ * args_.length + token) * args_.kv_heads + head_) * args_.group +
                member) * args_.head_size;
      for (int64_t d = 0; d < args_.head_size; d += kLanes)
        store_some(out + d, load(s_.sums + row * width_ + d) * factor / total,
                   std::min<int64_t>(kLanes, args_.head_size - d));
    }
  }

  const AttentionArgs& args_;
  Scratch& s_;
  const int64_t batch_, head_, first_;
  const RowGroups groups_;
  const int64_t width_, reach_;
  bool in_place_ = false;
  const T* values_ = nullptr;  // of the tile's first key, in the cache
  const char* next_keys_ = nullptr;  // fetched while this tile's values are weighed
};

// Stores the new keys and values of one request and head; positions past the table are dropped.
template <class T>
void write_cache(const AttentionArgs& args, int64_t batch, int64_t head) {
  const int64_t reach = args.table_width * args.block_size;
  for (int64_t token = 0; token < args.length; ++token) {
    const int64_t position = args.starts[batch] + token;
    if (position >= reach) return;
    const int64_t block = args.tables[batch * args.table_width + position / args.block_size];
    T* target = static_cast<T*>(args.cache) + block * args.cache_stride.block +
                head * args.cache_stride.head +
                position % args.block_size * args.cache_stride.slot;
    const T* key = static_cast<const T*>(args.k) + batch * args.k_stride.batch +
                   head * args.k_stride.head + token * args.k_stride.token;
    const T* value = static_cast<const T*>(args.v) + batch * args.v_stride.batch +
                     head * args.v_stride.head + token * args.v_stride.token;
    std::copy_n(key, args.head_size, target);
    std::copy_n(value, args.head_size, target + args.cache_stride.kv);
  }
}

int64_t total_work(const AttentionArgs& args) {
  int64_t keys = 0;
  for (int64_t b = 0; b < args.batch; ++b)
    keys += args.length * (args.starts[b] + args.length);
  return keys * args.kv_heads * args.group * args.head_size;
}

template <class T>
void run(const AttentionArgs& args) {
  const int64_t tokens = std::min(args.length, std::max<int64_t>(1, kQueryRows / args.group));
  const int64_t tiles = (args.length + tokens - 1) / tokens;
  const int64_t heads = args.batch * args.kv_heads;
  const int threads = team_size(total_work(args), kSerialWork);
  if (tiles > 1)
    parallel_for(heads, 1, threads, [&](int64_t bh) {
      write_cache<T>(args, bh / args.kv_heads, bh % args.kv_heads);
    });
  parallel_for(heads * tiles, 1, threads, [&](int64_t item) {
    thread_local Scratch scratch;
    // The last query tiles see the most keys: they go first.
    const int64_t bh = item % heads, first = (tiles - 1 - item / heads) * tokens;
    const int64_t batch = bh / args.kv_heads, head = bh % args.kv_heads;
    if (tiles == 1) write_cache<T>(args, batch, head);
    Item<T>(args, scratch, batch, head, first, std::min(tokens, args.length - first)).run();
  });
}

}  // namespace

void causal_attention(const AttentionArgs& args) {
  if (args.batch == 0 || args.length == 0 || args.kv_heads == 0 || args.group == 0) return;
  RBLN_DISPATCH(args.dtype, T, run<T>(args));
}

}  // namespace rbln
