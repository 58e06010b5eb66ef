// The attention of some query rows of one KV head over a run of keys, wherever those lie.
//
// Every sum of a row takes the keys that the row sees in an order that counts from the first of
// them. A query's result therefore depends on those keys alone: not on where tiles begin, the chunk,
// its row in it, or the batch.
#pragma once

#include <type_traits>

#include "attention/query_rows.h"
#include "core/e4m3.h"
#include "core/transpose.h"
#include "linear/activations.h"
#include "linear/tile.h"

namespace rbln {

// The two products of a tile are functions of their own: inlined, their loops lose the registers
// to everything around them. Where they begin in a line costs or saves a few per cent.

// The cache that R rows' products fetch to: few rows need soon what they fetch, many have more in L1.
template <int R>
inline constexpr int kFetchTo = is_narrow_group(R) ? 3 : 2;

// scores[r * kRowStride + key] = scale * (query r . key) for P panels of keys.
template <class W, int R, int P>
__attribute__((noinline, aligned(64))) void score_tile(int64_t depth, const float* queries,
                                                       const W* keys, float scale,
                                                       const char* ahead, int64_t ahead_step,
                                                       float* scores) {
  VecF acc[R][P * kPanelVectors] = {};
  const W* panels[P];
  Ahead<P, kFetchTo<R>> fetch;
  fetch.step = P * ahead_step;
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    panels[p] = keys + p * kPanel * depth;
    fetch.address[p] = ahead + p * ahead_step;
  }
  multiply_panels<W, R, P>(panels, queries, depth, fetch, acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < P * kPanelVectors; ++c)
      store(scores + r * kRowStride + c * kLanes, acc[r][c] * scale);
}

// sums[r] = sums[r] * factors[r] + weights[r] . values, over C vectors of columns.
template <class T, int R, int C>
__attribute__((noinline, aligned(64))) void weigh_tile(int64_t keys, const float* weights,
                                                       const T* values, int64_t value_stride,
                                                       const char* ahead, int64_t ahead_step,
                                                       const float* factors, float* sums,
                                                       int64_t sum_stride) {
  VecF acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      acc[r][c] = load(sums + r * sum_stride + c * kLanes);
      if (factors != nullptr) acc[r][c] *= factors[r];
    }
  multiply_rows<T, R, C, kRowStride, kFetchTo<R>>(keys, weights, values, value_stride, ahead,
                                                  ahead_step, acc);
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

// Tiles of columns that a product of R rows takes at once: enough chains to keep the units busy.
template <int R>
inline constexpr int kTilesAtOnce = !is_narrow_group(R) ? 1 : R == 1 && kLanes == 8 ? 4 : 2;

// Over keys of type T, multiplied as type W, bf16 or floats; queries and results are of the
// arguments' own.
// `Keys` has void locate(int64_t begin, int64_t count, KeyTile<T>&), called for ascending tiles.
template <class T, class W, class Keys>
class Attention {
 public:
  Attention(const AttentionArgs& args, Scratch& scratch, Keys& keys, const QueryRun& run)
      : args_(args), s_(scratch), keys_(keys), groups_(run.count * args.group),
        depth_(round_up(args.head_size, Layout<W>::kStep)),
        width_(round_up(args.value_size, kLanes)),
        fetches_evenly_(is_narrow_group(int(groups_.rows))), rows_(args, scratch, run, width_) {
    s_.reserve(groups_.rows, width_, groups_.rows * words(), kKeys * key_words(), kKeys * width_);
  }

  // Inlined, it asks for the thread's scratch again and again.
  __attribute__((noinline)) void compute() {
    rows_.begin();
    RBLN_DISPATCH(args_.dtype, Q, load_queries<Q>());
    const int64_t keys = rows_.limit(groups_.rows - 1);
    for (int64_t begin = rows_.low(0); begin < keys; begin += kKeys) attend_tile(begin, keys);
    RBLN_DISPATCH(args_.dtype, Q, rows_.write<Q>());
  }

 private:
  static constexpr int kWordDepth = Activations<W>::kWordDepth;

  // Of a row's query, and of a key in its panel.
  int64_t words() const { return depth_ / kWordDepth; }
  int64_t key_words() const { return depth_ * int64_t(sizeof(W)) / int64_t(sizeof(float)); }

  template <class Q>
  void load_queries() {
    for (int64_t g = 0; g < groups_.count; ++g) {
      const Q* queries[kMaxTileRows] = {};
      for (int r = 0; r < groups_.size(g); ++r)
        queries[r] = rows_.query<Q>(groups_.begin(g) + r);
      interleave<kWordDepth>(queries, groups_.size(g), args_.head_size, words(),
                             s_.queries + groups_.begin(g) * words());
    }
  }

  // Keys become columns in panels; columns past the last key repeat it.
  void load_keys() {
    keys_.locate(begin_, count_, tile_);
    std::fill(tile_.keys + count_, tile_.keys + kKeys, tile_.keys[count_ - 1]);
    plan_fetching();
    for (int64_t i = 0; i < count_; i += kPanel) {
      float* const panel = s_.keys + i * key_words();
      if constexpr (std::is_same_v<W, bf16>) {
        for (int64_t half = 0; half < kPanel; half += 8) {
          if (fetches_evenly_) fetch_values(i + half, 8);
          transpose_pairs(tile_.keys + i + half, args_.head_size,
                          reinterpret_cast<uint32_t*>(panel) + half);
        }
      } else {
        if (fetches_evenly_) fetch_values(i, kPanel);
        transpose_panel(tile_.keys + i, args_.head_size, panel);
      }
    }
  }

  // Has the products fetch what comes next. Those of a decode step's few rows take as long as memory
  // and fetch evenly: the values of a tile before its scores, later keys from then on. Many rows fetch
  // again and again all that they can, since a fetch too many at once is dropped.
  void plan_fetching() {
    const auto& [own, after] = tile_.next;
    const T* rows[2] = {own.rows + args_.cache_stride.kv, own.rows};
    int64_t counts[2] = {own.count, own.count};
    if (fetches_evenly_ && after.count > 0) {
      rows[0] = own.rows, rows[1] = after.rows, counts[1] = after.count;
    } else if (fetches_evenly_) {
      counts[0] = own.count / 2, counts[1] = own.count - counts[0];
      rows[0] = own.rows, rows[1] = own.rows + counts[0] * args_.cache_stride.slot;
    }
    const int64_t row_bytes = args_.cache_stride.slot * int64_t(sizeof(T));
    for (int i = 0; i < 2; ++i)
      ahead_[i] = reinterpret_cast<const char*>(counts[i] == 0 ? tile_.keys[0] : rows[i]);
    panel_ahead_ = counts[0] * row_bytes * kPanel / round_up(count_, kTileColumns);
    step_ahead_ = panel_ahead_ * Layout<W>::kStep / depth_;
    vector_ahead_ = counts[1] * row_bytes * kLanes / (width_ * count_);
  }

  void fetch_values(int64_t first, int64_t rows) const {
    for (int64_t i = first; i < std::min(first + rows, count_); ++i)
      for (int64_t d = 0; d < args_.value_size; d += 64 / int64_t(sizeof(T)))
        __builtin_prefetch(tile_.value(i) + d);
  }

  // Values are read where they lie if few rows use them; else, or where they lie apart or a row is
  // not made of whole vectors, they are copied as f32.
  void load_values() {
    has_values_ = true;
    in_place_ = tile_.value_stride != 0 && width_ == args_.value_size &&
                (groups_.count <= 2 || sizeof(T) == sizeof(float));
    if (in_place_) return;
    for (int64_t i = 0; i < count_; ++i) {
      const T* const value = tile_.value(i);
      for (int64_t d = 0; d < args_.value_size; d += kLanes)
        store(s_.values + i * width_ + d,
              load_some(value + d, std::min<int64_t>(kLanes, args_.value_size - d)));
    }
  }

  void attend_tile(int64_t begin, int64_t keys) {
    begin_ = begin;
    count_ = std::min(kKeys, keys - begin);
    rows_.move_to(begin_, count_);
    load_keys();
    has_values_ = false;
    for (int64_t g = 0; g < groups_.count; ++g) {
      const int64_t first = groups_.begin(g);
      if (rows_.are_blind(first, first + groups_.size(g) - 1)) continue;
      with_rows(groups_.size(g), [&]<int R>() { attend_group<R>(first); });
    }
  }

  template <int R>
  void attend_group(int64_t row0) {
    score<R>(row0);
    rows_.softmax(row0, R);
    if (!has_values_) load_values();
    // Keys that every row sees, between what the first rows see alone and what the last ones do.
    const int64_t end = rows_.to(row0), start = std::min(rows_.from(row0 + R - 1), end);
    const bool staggered = rows_.from(row0) < start;
    if (staggered) {
      sum_up<R>(row0, 0, 0, true);
      for (int r = 0; r < R; ++r)
        sum_up<1>(row0 + r, rows_.from(row0 + r), std::min(rows_.to(row0 + r), start), false);
    }
    sum_up<R>(row0, start, end, !staggered);
    for (int r = 0; r < R; ++r)
      sum_up<1>(row0 + r, std::max(rows_.from(row0 + r), end), rows_.to(row0 + r), false);
  }

  template <int R, int N = kTilesAtOnce<R>>
  void score(int64_t row0, int64_t key = 0) {
    for (; key + (N - 1) * kTileColumns < count_; key += N * kTileColumns)
      score_panels<R, N * kTilePanels>(row0, key);
    if constexpr (N > 1) score<R, N / 2>(row0, key);
  }

  template <int R, int P>
  void score_panels(int64_t row0, int64_t key) {
    score_tile<W, R, P>(depth_, s_.queries + row0 * words(),
                        reinterpret_cast<const W*>(s_.keys + key * key_words()), args_.scale,
                        ahead_[0] + key / kPanel * panel_ahead_, step_ahead_,
                        rows_.scores(row0) + key);
  }

  // Adds the keys [begin, end) of the tile to the rows' sums, after rescaling them on `rescale`.
  template <int R>
  void sum_up(int64_t row0, int64_t begin, int64_t end, bool rescale) {
    if (begin >= end && !rescale) return;
    sum_columns<R, kTilesAtOnce<R>>(row0, 0, begin, end, rescale ? rows_.factors(row0) : nullptr);
  }

  template <int R, int N>
  void sum_columns(int64_t row0, int64_t d, int64_t begin, int64_t end, const float* factors) {
    for (; d + N * kTileColumns <= width_; d += N * kTileColumns)
      weigh<R, N * kTileVectors>(row0, d, begin, end, factors);
    if constexpr (N > 1) return sum_columns<R, N / 2>(row0, d, begin, end, factors);
    for (; d < width_; d += kLanes) weigh<R, 1>(row0, d, begin, end, factors);
  }

  template <int R, int C>
  void weigh(int64_t row0, int64_t d, int64_t begin, int64_t end, const float* factors) {
    const float* weights = rows_.scores(row0) + begin;
    float* sums = rows_.sums(row0) + d;
    const int64_t step = C * vector_ahead_;
    const char* const ahead = ahead_[1] + d / kLanes * count_ * vector_ahead_ + begin * step;
    if (in_place_) {
      const int64_t stride = tile_.value_stride;
      weigh_tile<T, R, C>(end - begin, weights, tile_.values[0] + begin * stride + d, stride,
                          ahead, step, factors, sums, width_);
    } else {
      weigh_tile<float, R, C>(end - begin, weights, s_.values + begin * width_ + d, width_, ahead,
                              step, factors, sums, width_);
    }
  }

  const AttentionArgs& args_;
  Scratch& s_;
  Keys& keys_;
  const RowGroups groups_;
  const int64_t depth_, width_;
  const bool fetches_evenly_;
  QueryRows rows_;
  int64_t begin_ = 0, count_ = 0;  // the keys of the tile
  KeyTile<T> tile_;
  // What scores and sums fetch meanwhile, and the bytes: with a panel of scores, with a step of one,
  // and with a vector of values.
  const char* ahead_[2];
  int64_t panel_ahead_ = 0, step_ahead_ = 0, vector_ahead_ = 0;
  bool has_values_ = false, in_place_ = false;  // of the tile
};

// Computes a run. Keys of bf16 stay so in their panels, half the size of floats.
template <class T, class Keys>
void attend(const AttentionArgs& args, Scratch& scratch, Keys& keys, const QueryRun& run) {
  if constexpr (std::is_same_v<T, bf16> || (kMultipliesPairs && std::is_same_v<T, e4m3>)) {
    if (args.dtype == Dtype::bf16)
      return Attention<T, bf16, Keys>(args, scratch, keys, run).compute();
  }
  if constexpr (!std::is_same_v<T, bf16>)
    Attention<T, float, Keys>(args, scratch, keys, run).compute();
}

}  // namespace rbln
