// The softmax of some query rows of one KV head over tiles of keys.
//
// Keys come in tiles of kKeys with an online softmax. Weights are kept relative to a power of two,
// so rescaling is exact. Masked keys are left out: what a row does not see may be NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "core/functions.h"
#include "core/simd.h"
#include "core/team.h"

namespace rbln {

inline constexpr int64_t kKeys = 64;       // key positions per tile
inline constexpr int64_t kRowStride = kKeys + kLanes;  // of scores: zeros go between the rows
// Query rows (tokens x group) an item aims at: what the keys and values of a tile are arranged for.
inline constexpr int64_t kQueryRows = kMultipliesPairs ? 132 : 72;
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

// Items that a thread claims at once: neighbours, so that one fetches the next one's first keys; few
// enough that all threads end at about the same time.
inline int64_t items_at_once(int64_t items, int threads) {
  constexpr int64_t kClaims = 4;  // of a thread
  constexpr int64_t kMost = 8;
  return std::clamp<int64_t>(items / (threads * kClaims), 1, kMost);
}

// Where the rows of one tile lie.
template <class T>
struct KeyTile {
  const T* keys[kKeys];
  const T* values[kKeys];  // where value_stride is not 0, the first alone
  int64_t value_stride;    // between the values of neighbours, or 0 where they lie apart
  // What is fetched meanwhile, a slot apart: the keys that are read kKeys rows later, so that memory
  // has the same to do all the time. The first tile fetches what comes before those, too.
  struct Run {
    const T* rows;
    int64_t count;
  } next[2];

  // Sets `next` for a tile of `count` keys, which `own` follow, and `after` those.
  void look_ahead(int64_t count, bool is_first, Run own, Run after, int64_t slot) {
    const int64_t skipped = is_first ? 0 : kKeys - count, most = is_first ? kKeys : count;
    const auto part = [slot](Run run, int64_t begin, int64_t rows) {
      begin = std::clamp<int64_t>(begin, 0, run.count);
      return Run{run.rows + begin * slot, std::min(run.count - begin, rows)};
    };
    next[0] = part(own, skipped, most);
    next[1] = part(after, skipped - own.count, most - next[0].count);
    if (next[0].count == 0) std::swap(next[0], next[1]);
  }

  const T* value(int64_t i) const {
    return value_stride == 0 ? values[i] : values[0] + i * value_stride;
  }
};

// Tokens [first, first + count) of a request, all query heads of one KV head. Token t sees the
// `window` last of the keys [0, min(start + t + 1, end)).
struct QueryRun {
  int64_t batch, head, first, count;
  int64_t start, end, window;

  // The end of the keys that a token of the run sees.
  int64_t limit(int64_t token) const { return std::min(start + first + token + 1, end); }
  // The first key that the token with this limit sees.
  int64_t low(int64_t limit, int64_t chunk) const {
    const int64_t of_chunk = chunk == 0 ? 0 : (limit - 1) / chunk * chunk;
    return std::max(of_chunk, limit - window);
  }
};

struct Scratch {
  std::vector<float> memory;
  std::vector<int64_t> limits;  // per query row: the end of the keys it sees
  // The first three are laid out by Attention.
  float *queries, *keys, *values, *scores, *sums, *exponents, *totals, *factors;

  void reserve(int64_t rows, int64_t width, int64_t query_size, int64_t key_size,
               int64_t value_size) {
    const int64_t sizes[] = {query_size,   key_size, value_size,    (rows + 1) * kRowStride,
                             rows * width, rows,     rows * kLanes, rows};
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

// The rows' side of an item: which keys each sees, its scores, sums and total.
class QueryRows {
 public:
  QueryRows(const AttentionArgs& args, Scratch& scratch, const QueryRun& run, int64_t width)
      : args_(args), s_(scratch), run_(run), count_(run.count * args.group), width_(width) {}

  // After the scratch is reserved.
  void begin() {
    for (int64_t row = 0; row < count_; ++row)
      s_.limits[size_t(row)] = run_.limit(row / args_.group);
    std::fill_n(s_.sums, count_ * width_, 0.0f);
    std::fill_n(s_.totals, count_ * kLanes, 0.0f);
    std::fill_n(s_.exponents, count_, kNoExponent);
  }

  int64_t count() const { return count_; }

  template <class T>
  const T* query(int64_t row) const {
    return static_cast<const T*>(args_.q) + run_.batch * args_.q_stride.batch +
           run_.head * args_.q_stride.head + row % args_.group * args_.q_stride.group +
           (run_.first + row / args_.group) * args_.q_stride.token;
  }

  // A row sees the keys [low, limit); both grow from row to row.
  int64_t limit(int64_t row) const { return s_.limits[size_t(row)]; }
  int64_t low(int64_t row) const { return run_.low(limit(row), args_.chunk); }

  // The keys of the tile that the following is about.
  void move_to(int64_t begin, int64_t keys) {
    begin_ = begin;
    keys_ = keys;
  }

  // The part of the tile that a row sees, as the tile counts its keys; empty where from >= to.
  int64_t from(int64_t row) const { return std::clamp<int64_t>(low(row) - begin_, 0, keys_); }
  int64_t to(int64_t row) const { return std::clamp<int64_t>(limit(row) - begin_, 0, keys_); }

  // True if none of the rows [first, last] sees any key of the tile.
  bool are_blind(int64_t first, int64_t last) const {
    return limit(last) <= begin_ || low(first) >= begin_ + keys_;
  }

  float* scores(int64_t row) const { return s_.scores + kLanes + row * kRowStride; }
  float* sums(int64_t row) const { return s_.sums + row * width_; }
  // By which the sums are to be multiplied before anything of the tile is added.
  const float* factors(int64_t row) const { return s_.factors + row; }

  // Scores to weights against the running exponents. Step by step for all rows of the group, so
  // that the latency of one row's reduction hides behind the next row's.
  inline __attribute__((always_inline)) void softmax(int64_t row0, int rows) {
    bend(row0, rows);
    for (int r = 0; r < rows; ++r) find_exponent(row0 + r);
    for (int r = 0; r < rows; r += kLanes) {
      const int64_t some = std::min(kLanes, rows - r);
      float* factors = s_.factors + row0 + r;
      store_some(factors, power_of_two(load_some(factors, some)), some);
    }
    for (int r = 0; r < rows; ++r) weigh_scores(row0 + r);
  }

  // A sink is one more logit in the denominator.
  template <class T>
  void write() {
    for (int64_t row = 0; row < count_; ++row) {
      const int64_t member = row % args_.group, token = run_.first + row / args_.group;
      float factor = 1.0f, total = reduce_sum(load(s_.totals + row * kLanes));
      if (args_.sinks != nullptr) {
        const VecF sink = broadcast(args_.sinks[run_.head * args_.group + member]);
        const Exponential e = exp_parts(in_range(sink));
        const float exponent = std::max(s_.exponents[row], e.exponent[0]);
        factor = power_of_two(broadcast(s_.exponents[row] - exponent))[0];
        total = total * factor + (e.fraction * power_of_two(e.exponent - exponent))[0];
      }
      T* out = static_cast<T*>(args_.out) +
               (((run_.batch * args_.length + token) * args_.kv_heads + run_.head) * args_.group +
                member) * args_.value_size;
      for (int64_t d = 0; d < args_.value_size; d += kLanes)
        store_some(out + d, load(s_.sums + row * width_ + d) * factor * args_.v_scale / total,
                   std::min<int64_t>(kLanes, args_.value_size - d));
    }
  }

 private:
  // Below every exponent of a score, in reach of exact float arithmetic.
  static constexpr float kNoExponent = -8388608.0f;

  // Where a score's exponent is exact. Beyond, a float is too coarse for a softmax anyway.
  static VecF in_range(VecF score) {
    return min(broadcast(1e6f), max(broadcast(-1e6f), score));
  }

  // The layer's changes to scores besides scaling.
  inline __attribute__((always_inline)) void bend(int64_t row0, int rows) {
    if (args_.soft_cap > 0)
      for (int r = 0; r < rows; ++r)
        for (float* x = scores(row0 + r); x < scores(row0 + r) + kKeys; x += kLanes)
          store(x, tanh(load(x) / args_.soft_cap) * args_.soft_cap);
    if (args_.slopes != nullptr)
      for (int r = 0; r < rows; ++r) add_slope(row0 + r);
  }

  // Distances from the row's own token: the same wherever the tile begins.
  void add_slope(int64_t row) {
    const float slope = args_.slopes[run_.head * args_.group + row % args_.group];
    float* x = scores(row);
    for (int64_t i = 0; i < keys_; ++i) x[i] += slope * float(begin_ + i + 1 - limit(row));
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
    if (end == kKeys && (begin_ - low(row)) % kLanes == 0 && begin == 0) return weigh_all(row);
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

  // The same of a row that sees the whole tile, whose vectors stay in registers.
  void weigh_all(int64_t row) {
    float* const x = scores(row);
    const VecF exponent = broadcast(s_.exponents[row]);
    VecF total = load(s_.totals + row * kLanes) * s_.factors[row];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      const Exponential e = exp_parts(in_range(load(x + i)));
      const VecF weight = e.fraction * power_of_two(e.exponent - exponent);
      store(x + i, weight);
      total += weight;
    }
    store(s_.totals + row * kLanes, total);
  }

  const AttentionArgs& args_;
  Scratch& s_;
  const QueryRun run_;
  const int64_t count_, width_;
  int64_t begin_ = 0, keys_ = 0;  // the tile
};

}  // namespace rbln
