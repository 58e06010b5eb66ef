// The attention of some query rows of one KV head over a run of keys, wherever those lie.
//
// Keys come in tiles of kKeys with an online softmax. Weights are kept relative to a power of two,
// so rescaling is exact, and every sum of a row takes the keys that the row sees in an order that
// counts from the first of them. A query's result therefore depends on those keys alone: not on
// where tiles begin, the chunk, its row in it, or the batch. Masked keys are left out, never
// multiplied by zero: what a row does not see may be NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/attention.h"
#include "core/e4m3.h"
#include "core/functions.h"
#include "core/team.h"
#include "core/transpose.h"
#include "linear/tile.h"

namespace rbln {

inline constexpr int64_t kKeys = 64;       // key positions per tile
inline constexpr int64_t kRowStride = kKeys + kLanes;  // of scores: zeros go between the rows
inline constexpr int64_t kQueryRows = 72;  // query rows (tokens x group) an item aims at
inline constexpr int64_t kSerialWork = 1 << 18;  // multiply-adds worth less than waking the team

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

inline constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// A row of the new keys or values.
template <class T>
inline const T* new_row(const void* rows, const TokenStrides& stride, int64_t batch, int64_t head,
                        int64_t token) {
  return static_cast<const T*>(rows) + batch * stride.batch + head * stride.head +
         token * stride.token;
}

// Tokens of a request that one work item takes.
inline int64_t tokens_per_item(const AttentionArgs& args) {
  return std::min(args.length, std::max<int64_t>(1, kQueryRows / args.group));
}

// Where the rows of one tile lie.
template <class T>
struct KeyTile {
  const T* keys[kKeys];
  const T* values[kKeys];  // where value_stride is not 0, the first alone
  int64_t value_stride;    // between the values of neighbours, or 0 where they lie apart
  // What is fetched into the caches meanwhile: the values that this tile's weights will multiply,
  // or the next tile's where these are there already; then the next tile's keys.
  const T *fetch_values, *fetch_keys;
};

// Tokens [first, first + count) of a request, all query heads of one KV head. Token t sees the
// `window` last of the keys [0, min(start + t + 1, end)).
struct QueryRun {
  int64_t batch, head, first, count;
  int64_t start, end, window;
};

struct Scratch {
  std::vector<float> memory;
  std::vector<int64_t> limits;  // per query row: the end of the keys it sees
  float *queries, *keys, *values, *scores, *sums, *exponents, *totals, *factors;

  void reserve(int64_t rows, int64_t depth, int64_t width) {
    const int64_t sizes[] = {rows * depth, kKeys * depth, kKeys * width, (rows + 1) * kRowStride,
                             rows * width, rows,          rows * kLanes, rows};
    float** parts[] = {&queries, &keys, &values, &scores, &sums, &exponents, &totals, &factors};
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

// scores[r * kRowStride + key] = scale * (query r . key) for P panels of keys.
template <int R, int P>
__attribute__((noinline)) void score_tile(int64_t depth, const float* queries, const float* keys,
                                          float scale, const char* ahead, int64_t panel_bytes,
                                          int64_t element_bytes, float* scores) {
  VecF acc[R][P * kPanelVectors] = {};
  const float* panels[P];
  Ahead<P> fetch;
  fetch.step = kPanel * element_bytes;
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    panels[p] = keys + p * kPanel * depth;
    fetch.address[p] = ahead + p * panel_bytes;
  }
  multiply_panels<float, R, P>(panels, queries, depth, fetch, acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < P * kPanelVectors; ++c)
      store(scores + r * kRowStride + c * kLanes, acc[r][c] * scale);
}

// sums[r] = sums[r] * factors[r] + weights[r] . values, over C vectors of columns.
template <class T, int R, int C>
__attribute__((noinline)) void weigh_tile(int64_t keys, const float* weights, const T* values,
                                          int64_t value_stride, const char* ahead,
                                          const float* factors, float* sums, int64_t sum_stride) {
  VecF acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      acc[r][c] = load(sums + r * sum_stride + c * kLanes);
      if (factors != nullptr) acc[r][c] *= factors[r];
    }
  multiply_rows<T, R, C, kRowStride>(keys, weights, values, value_stride, ahead, acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sums + r * sum_stride + c * kLanes, acc[r][c]);
}

// Runs f.template operator()<S>() with S as the type of the cache.
template <class F>
inline void with_stored_type(const AttentionArgs& args, F&& f) {
  if (args.is_e4m3) return f.template operator()<e4m3>();
  RBLN_DISPATCH(args.dtype, S, f.template operator()<S>());
}

// Over keys of type T; queries and results are of the arguments' own.
// `Keys` has void locate(int64_t begin, int64_t count, KeyTile<T>&), asked for ascending tiles.
template <class T, class Keys>
class Attention {
 public:
  Attention(const AttentionArgs& args, Scratch& scratch, Keys& keys, const QueryRun& run)
      : args_(args), s_(scratch), keys_(keys), run_(run), groups_(run.count * args.group),
        width_(round_up(args.value_size, kTileColumns)) {
    s_.reserve(groups_.rows, args.head_size, width_);
  }

  void compute() {
    for (int64_t row = 0; row < groups_.rows; ++row)
      s_.limits[size_t(row)] =
          std::min(run_.start + run_.first + row / args_.group + 1, run_.end);
    RBLN_DISPATCH(args_.dtype, Q, load_queries<Q>());
    std::fill_n(s_.sums, groups_.rows * width_, 0.0f);
    std::fill_n(s_.totals, groups_.rows * kLanes, 0.0f);
    std::fill_n(s_.exponents, groups_.rows, kNoExponent);
    const int64_t keys = limit(groups_.rows - 1);
    for (int64_t begin = low(0); begin < keys; begin += kKeys) attend_tile(begin, keys);
    RBLN_DISPATCH(args_.dtype, Q, write_rows<Q>());
  }

 private:
  // Below every exponent of a score, in reach of exact float arithmetic.
  static constexpr float kNoExponent = -8388608.0f;

  // Where a score's exponent is exact. Beyond, a float is too coarse for a softmax anyway.
  static VecF in_range(VecF score) {
    return min(broadcast(1e6f), max(broadcast(-1e6f), score));
  }

  // A row sees the keys [low, limit); both grow from row to row.
  int64_t limit(int64_t row) const { return s_.limits[size_t(row)]; }
  int64_t low(int64_t row) const {
    if (args_.chunk > 0) return (limit(row) - 1) / args_.chunk * args_.chunk;
    return std::max<int64_t>(0, limit(row) - run_.window);
  }

  // The part of the tile that a row sees, as the tile counts its keys; empty where from >= to.
  int64_t from(int64_t row) const { return std::clamp<int64_t>(low(row) - begin_, 0, count_); }
  int64_t to(int64_t row) const { return std::clamp<int64_t>(limit(row) - begin_, 0, count_); }

  float* scores(int64_t row) const { return s_.scores + kLanes + row * kRowStride; }

  template <class Q>
  void load_queries() {
    for (int64_t g = 0; g < groups_.count; ++g) {
      const int size = groups_.size(g);
      float* target = s_.queries + groups_.begin(g) * args_.head_size;
      for (int r = 0; r < size; ++r) {
        const int64_t row = groups_.begin(g) + r;
        const Q* q = static_cast<const Q*>(args_.q) + run_.batch * args_.q_stride.batch +
                     run_.head * args_.q_stride.head + row % args_.group * args_.q_stride.group +
                     (run_.first + row / args_.group) * args_.q_stride.token;
        for (int64_t d = 0; d < args_.head_size; ++d) target[d * size + r] = to_float(q[d]);
      }
    }
  }

  // Keys become f32 columns in panels; columns past the last key repeat it. Values are read where
  // they lie if few rows use them; else, or where they lie apart or a row is not made of whole
  // vectors, they are copied as f32.
  void load_tile() {
    keys_.locate(begin_, count_, tile_);
    std::fill(tile_.keys + count_, tile_.keys + kKeys, tile_.keys[count_ - 1]);
    for (int64_t i = 0; i < count_; i += kPanel)
      transpose_panel(tile_.keys + i, args_.head_size, s_.keys + i * args_.head_size);
    in_place_ = tile_.value_stride != 0 && width_ == args_.value_size &&
                (groups_.count <= 2 || sizeof(T) == sizeof(float));
    if (in_place_) return;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t stride = tile_.value_stride;
      const T* value = stride == 0 ? tile_.values[i] : tile_.values[0] + i * stride;
      for (int64_t d = 0; d < args_.value_size; d += kLanes)
        store(s_.values + i * width_ + d,
              load_some(value + d, std::min<int64_t>(kLanes, args_.value_size - d)));
    }
  }

  void attend_tile(int64_t begin, int64_t keys) {
    begin_ = begin;
    count_ = std::min(kKeys, keys - begin);
    load_tile();
    for (int64_t g = 0; g < groups_.count; ++g) {
      const int64_t first = groups_.begin(g), last = first + groups_.size(g) - 1;
      if (limit(last) <= begin || low(first) >= begin + count_) continue;
      with_rows(groups_.size(g), [&]<int R>() { attend_group<R>(first); });
    }
  }

  template <int R>
  void attend_group(int64_t row0) {
    score<R>(row0);
    if (args_.soft_cap > 0)
      for (int r = 0; r < R; ++r)
        for (float* x = scores(row0 + r); x < scores(row0 + r) + kKeys; x += kLanes)
          store(x, tanh(load(x) / args_.soft_cap) * args_.soft_cap);
    if (args_.slopes != nullptr)
      for (int r = 0; r < R; ++r) add_slope(row0 + r);
    softmax<R>(row0);
    // Keys that every row sees, between what the first rows see alone and what the last ones do.
    const int64_t end = to(row0), start = std::min(from(row0 + R - 1), end);
    const bool staggered = from(row0) < start;
    if (staggered) {
      sum_up<R>(row0, 0, 0, true);
      for (int r = 0; r < R; ++r) sum_up<1>(row0 + r, from(row0 + r), std::min(to(row0 + r), start), false);
    }
    sum_up<R>(row0, start, end, !staggered);
    for (int r = 0; r < R; ++r) sum_up<1>(row0 + r, std::max(from(row0 + r), end), to(row0 + r), false);
  }

  template <int R>
  void score(int64_t row0) {
    int64_t key = 0;
    if constexpr (is_narrow_group(R))
      for (; key + kTileColumns < count_; key += 2 * kTileColumns)
        score_panels<R, 2 * kTilePanels>(row0, key);
    for (; key < count_; key += kTileColumns) score_panels<R, kTilePanels>(row0, key);
  }

  template <int R, int P>
  void score_panels(int64_t row0, int64_t key) {
    const int64_t depth = args_.head_size, stride = tile_.value_stride;
    score_tile<R, P>(depth, s_.queries + row0 * depth, s_.keys + key * depth, args_.scale,
                     reinterpret_cast<const char*>(tile_.fetch_values + key * stride),
                     stride * kPanel * int64_t(sizeof(T)), int64_t(sizeof(T)),
                     scores(row0) + key);
  }

  // Distances from the row's own token: the same wherever the tile begins.
  void add_slope(int64_t row) {
    const float slope = args_.slopes[run_.head * args_.group + row % args_.group];
    float* x = scores(row);
    for (int64_t i = 0; i < count_; ++i) x[i] += slope * float(begin_ + i + 1 - limit(row));
  }

  // Scores to weights against the running exponents. Step by step for all rows of the group, so
  // that the latency of one row's reduction hides behind the next row's.
  template <int R>
  void softmax(int64_t row0) {
    for (int r = 0; r < R; ++r) find_exponent(row0 + r);
    static_assert(kMaxTileRows <= kLanes);
    float* factors = s_.factors + row0;
    store_some(factors, power_of_two(load_some(factors, R)), R);
    for (int r = 0; r < R; ++r) weigh_scores(row0 + r);
  }

  // Leaves the exponent of the row's rescaling factor: 0 where it sees nothing of the tile.
  void find_exponent(int64_t row) {
    s_.factors[row] = 0.0f;
    const int64_t begin = from(row), end = to(row);
    if (begin >= end) return;
    float* x = scores(row);
    std::fill(x, x + begin, -std::numeric_limits<float>::infinity());
    std::fill(x + end, x + kKeys, -std::numeric_limits<float>::infinity());
    VecF largest = load(x);
    for (int64_t i = kLanes; i < kKeys; i += kLanes) largest = max(largest, load(x + i));
    const VecF maximum = broadcast(reduce_max(largest));
    const float exponent = std::max(s_.exponents[row], exp_parts(in_range(maximum)).exponent[0]);
    s_.factors[row] = s_.exponents[row] - exponent;
    s_.exponents[row] = exponent;
  }

  // The lanes of a row's total count from the first key it sees; zeros fill up its vectors.
  void weigh_scores(int64_t row) {
    const int64_t begin = from(row), end = to(row);
    if (begin >= end) return;
    float* x = scores(row);
    for (int64_t i = begin / kLanes * kLanes; i < end; i += kLanes) {
      const Exponential e = exp_parts(in_range(load(x + i)));
      store(x + i, e.fraction * power_of_two(e.exponent - s_.exponents[row]));
    }
    const int64_t start = begin - (begin_ + begin - low(row)) % kLanes;
    std::fill(x + start, x + begin, 0.0f);
    store(x + end, VecF{});
    VecF total = load(s_.totals + row * kLanes) * s_.factors[row];
    for (int64_t i = start; i < end; i += kLanes) total += load(x + i);
    store(s_.totals + row * kLanes, total);
  }

  // Adds the keys [begin, end) of the tile to the rows' sums, which it rescales before if asked.
  template <int R>
  void sum_up(int64_t row0, int64_t begin, int64_t end, bool rescale) {
    if (begin >= end && !rescale) return;
    const float* factors = rescale ? s_.factors + row0 : nullptr;
    int64_t d = 0;
    if constexpr (is_narrow_group(R))
      for (; d + 2 * kTileColumns <= width_; d += 2 * kTileColumns)
        weigh<R, 2 * kTileVectors>(row0, d, begin, end, factors);
    for (; d < width_; d += kTileColumns) weigh<R, kTileVectors>(row0, d, begin, end, factors);
  }

  template <int R, int C>
  void weigh(int64_t row0, int64_t d, int64_t begin, int64_t end, const float* factors) {
    const float* weights = scores(row0) + begin;
    float* sums = s_.sums + row0 * width_ + d;
    const char* ahead = reinterpret_cast<const char*>(tile_.fetch_keys + d * kKeys);
    if (in_place_) {
      const int64_t stride = tile_.value_stride;
      weigh_tile<T, R, C>(end - begin, weights, tile_.values[0] + begin * stride + d, stride,
                          ahead, factors, sums, width_);
    } else {
      weigh_tile<float, R, C>(end - begin, weights, s_.values + begin * width_ + d, width_, ahead,
                              factors, sums, width_);
    }
  }

  // A sink is one more logit in the denominator.
  template <class Q>
  void write_rows() {
    for (int64_t row = 0; row < groups_.rows; ++row) {
      const int64_t member = row % args_.group, token = run_.first + row / args_.group;
      float factor = 1.0f, total = reduce_sum(load(s_.totals + row * kLanes));
      if (args_.sinks != nullptr) {
        const VecF sink = broadcast(args_.sinks[run_.head * args_.group + member]);
        const Exponential e = exp_parts(in_range(sink));
        const float exponent = std::max(s_.exponents[row], e.exponent[0]);
        factor = power_of_two(broadcast(s_.exponents[row] - exponent))[0];
        total = total * factor + (e.fraction * power_of_two(e.exponent - exponent))[0];
      }
      Q* out = static_cast<Q*>(args_.out) +
               (((run_.batch * args_.length + token) * args_.kv_heads + run_.head) * args_.group +
                member) * args_.value_size;
      for (int64_t d = 0; d < args_.value_size; d += kLanes)
        store_some(out + d, load(s_.sums + row * width_ + d) * factor * args_.v_scale / total,
                   std::min<int64_t>(kLanes, args_.value_size - d));
    }
  }

  const AttentionArgs& args_;
  Scratch& s_;
  Keys& keys_;
  const QueryRun run_;
  const RowGroups groups_;
  const int64_t width_;
  int64_t begin_ = 0, count_ = 0;  // the keys of the tile
  KeyTile<T> tile_;
  bool in_place_ = false;
};

}  // namespace rbln
