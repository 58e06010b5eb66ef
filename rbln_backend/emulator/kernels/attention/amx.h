// The attention of attend.h by tiles, for queries of bf16 and a cache of bf16 or e4m3.
//
// Tiles of keys begin at multiples of kKeys, and products are over 32 positions at multiples of 32,
// in which a key that a row does not see weighs nothing. So here, too, a query's result depends on
// the keys that it sees alone. A weight is multiplied as the sum of three bf16 numbers: exactly.
#pragma once

#include <type_traits>

#include "attention/attend.h"
#include "core/amx.h"

namespace rbln {

#if defined(RBLN_TILES)

// `T` and `Keys` as for Attention.
template <class T, class Keys>
class TileAttention {
 public:
  TileAttention(const AttentionArgs& args, Scratch& scratch, Keys& keys, const QueryRun& run)
      : args_(args), s_(scratch), keys_(keys),
        steps_((args.head_size + amx::kDepth - 1) / amx::kDepth),
        width_(round_up(args.value_size, kPanel)), rows_(args, scratch, run, width_) {
    s_.reserve(rows_.count(), width_, round_up(rows_.count(), amx::kRows) * steps_ * kWords,
               kKeys * steps_ * kWords, kKeys / 2 * width_);
  }

  __attribute__((noinline)) void compute() {
    rows_.begin();
    arrange_queries();
    clear_depth_tail();
    const int64_t keys = rows_.limit(rows_.count() - 1);
    for (int64_t begin = rows_.low(0) / kKeys * kKeys; begin < keys; begin += kKeys)
      attend_tile(begin, std::min(kKeys, keys - begin));
    // A sum of nothing is zero, or minus zero if no product came after it: always zero then.
    for (float* x = rows_.sums(0); x < rows_.sums(rows_.count()); x += kLanes)
      store(x, load(x) + VecF{});
    rows_.write<bf16>();
  }

 private:
  static constexpr int64_t kWords = amx::kDepth / 2;  // of a row of 64 bytes
  static constexpr int64_t kTileWords = amx::kRows * kWords;
  static constexpr int64_t kHalf = kKeys / 2;
  static constexpr int kParts = 3;  // of 8 bits each
  static_assert(kHalf == amx::kDepth);

  // A value that is not finite. In a product it would reach rows that do not see its key.
  struct Odd {
    int64_t key, place;
    float value;
  };

  // Per group of 16 rows [steps][rows of the group][32 depths].
  bf16* queries(int64_t row0) const {
    return reinterpret_cast<bf16*>(s_.queries) + row0 * steps_ * amx::kDepth;
  }
  // Per panel of 16 keys [steps][16 pairs of depths][16 keys].
  uint32_t* keys(int64_t panel) const {
    return reinterpret_cast<uint32_t*>(s_.keys) + panel * steps_ * kTileWords;
  }
  // Per half of the keys and 16 places of a value [16 pairs of keys][16 places].
  uint32_t* values(int64_t half, int64_t place) const {
    return reinterpret_cast<uint32_t*>(s_.values) + half * kTileWords / amx::kColumns * width_ +
           place / amx::kColumns * kTileWords;
  }

  void arrange_queries() const {
    for (int64_t row0 = 0; row0 < rows_.count(); row0 += amx::kRows) {
      const int64_t size = std::min<int64_t>(amx::kRows, rows_.count() - row0);
      for (int64_t r = 0; r < size; ++r) {
        for (int64_t step = 0; step < steps_; ++step) {
          const int64_t first = step * amx::kDepth;
          const int64_t count = std::min<int64_t>(amx::kDepth, args_.head_size - first);
          bf16* target = queries(row0) + (step * size + r) * amx::kDepth;
          std::copy_n(rows_.query<bf16>(row0 + r) + first, count, target);
          std::fill(target + count, target + amx::kDepth, bf16{0});
        }
      }
    }
  }

  // Clears the padding of keys beyond their size.
  void clear_depth_tail() const {
    for (int64_t p = 0; p < kKeys / kPanel; ++p)
      std::fill(keys(p) + (args_.head_size + 1) / 2 * kPanel, keys(p + 1), 0u);
  }

  void attend_tile(int64_t begin, int64_t count) {
    count_ = count;
    rows_.move_to(begin, count);
    keys_.locate(begin, count, tile_);
    arrange_keys();
    arrange_values();
    for (int64_t row0 = 0; row0 < rows_.count(); row0 += amx::kRows) {
      const int size = int(std::min<int64_t>(amx::kRows, rows_.count() - row0));
      if (rows_.are_blind(row0, row0 + size - 1)) continue;
      block_.shape(size);
      score(row0, size);
      rows_.softmax(row0, size);
      split_weights(row0, size);
      sum_up(row0, size);
      for (const Odd& odd : odd_) add_odd(row0, size, odd);
    }
  }

  int64_t stride() const {
    return tile_.value_stride == 0 ? args_.cache_stride.slot : tile_.value_stride;
  }

  const T* value(int64_t key) const {
    return tile_.value_stride == 0 ? tile_.values[key] : tile_.values[0] + key * stride();
  }

  void fetch(const T* row, int64_t elements) const {
    for (int64_t i = 0; i < elements; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
  }

  // Eight keys at a time, the last one again where there are fewer; their values are fetched.
  void arrange_keys() {
    std::fill(tile_.keys + count_, tile_.keys + round_up(count_, 8), tile_.keys[count_ - 1]);
    for (int64_t i = 0; i < count_; i += 8) {
      for (int64_t k = i; k < std::min(i + 8, count_); ++k) fetch(value(k), args_.value_size);
      transpose_pairs(tile_.keys + i, args_.head_size, keys(i / kPanel) + i % kPanel);
    }
  }

  int64_t halves() const { return count_ > kHalf ? 2 : 1; }

  // Neighbours in a word, zero past the last key; the next tile's keys are fetched.
  void arrange_values() {
    VecU odd{};
    for (int64_t key = 0; key < halves() * kHalf; key += 2) {
      for (int64_t next = key; next < std::min(key + 2, tile_.next_count); ++next)
        fetch(tile_.next_keys + next * stride(), args_.head_size);
      for (int64_t d = 0; d < width_; d += kLanes) {
        const VecU first = value_words(key, d), second = value_words(key + 1, d);
        odd |= (VecU)((first & 0x7f800000u) == 0x7f800000u);
        odd |= (VecU)((second & 0x7f800000u) == 0x7f800000u);
        store_raw(place(key, d), first >> 16 | second);
      }
    }
    odd_.clear();
    bool is_odd = false;
    for (int i = 0; i < kLanes; ++i) is_odd |= odd[i] != 0;
    if (is_odd) set_aside();
  }

  // The values of kLanes places from `d` on as float32 has their bits.
  VecU value_words(int64_t key, int64_t d) const {
    if (key >= count_ || d >= args_.value_size) return VecU{};
    return (VecU)load_some(value(key) + d, std::min<int64_t>(kLanes, args_.value_size - d));
  }

  uint32_t* place(int64_t key, int64_t d) const {
    return values(key / kHalf, d) + key % kHalf / 2 * amx::kColumns + d % amx::kColumns;
  }

  void set_aside() {
    for (int64_t key = 0; key < count_; ++key)
      for (int64_t d = 0; d < args_.value_size; ++d) {
        const float number = to_float(value(key)[d]);
        if (std::isfinite(number)) continue;
        odd_.push_back({key, d, number});
        *place(key, d) &= key % 2 == 0 ? 0xffff0000u : 0xffffu;
      }
  }

  void score(int64_t row0, int size) const {
    static_assert(kKeys == 4 * kPanel);
    amx::unroll<4>([]<int p>() __attribute__((always_inline)) { amx::zero<p>(); });
    for (int64_t step = 0; step < steps_; ++step) {
      amx::load<4>(queries(row0) + step * size * amx::kDepth, amx::kRowBytes);
      amx::unroll<4>([&]<int p>() __attribute__((always_inline)) {
        amx::load<6 + p % 2>(keys(p) + step * kTileWords, amx::kRowBytes);
        amx::multiply<p, 4, 6 + p % 2>();
      });
    }
    amx::unroll<4>([&]<int p>() __attribute__((always_inline)) {
      amx::store<p>(rows_.scores(row0) + p * kPanel, kRowStride * int64_t(sizeof(float)));
    });
    for (int r = 0; r < size; ++r)
      for (float* x = rows_.scores(row0 + r); x < rows_.scores(row0 + r) + kKeys; x += kLanes)
        store(x, load(x) * args_.scale);
  }

  // Each weight as what it rounds to, what is missing then, and the rest; zero where a row sees
  // nothing.
  void split_weights(int64_t row0, int size) {
    for (int r = 0; r < size; ++r) {
      const float* x = rows_.scores(row0 + r);
      const int64_t begin = rows_.from(row0 + r), end = rows_.to(row0 + r);
      for (int64_t i = 0; i < kKeys; i += kLanes) {
        const bool is_seen = i + kLanes > begin && i < end;
        VecF weight = is_seen ? load(x + i) : VecF{};
        for (int part = 0; part < kParts; ++part) {
          store(weights_[part][r] + i, weight);
          weight -= rounded_to<bf16>(weight);
        }
      }
    }
  }

  void sum_up(int64_t row0, int size) {
    for (int r = 0; r < size; ++r) {
      const float factor = rows_.factors(row0)[r];
      if (factor == 1.0f) continue;
      float* sums = rows_.sums(row0 + r);
      for (int64_t d = 0; d < width_; d += kLanes) store(sums + d, load(sums + d) * factor);
    }
    const int64_t sum_bytes = width_ * int64_t(sizeof(float));
    for (int64_t half = 0; half < halves(); ++half) {
      amx::unroll<kParts>([&]<int part>() __attribute__((always_inline)) {
        amx::load<1 + part>(weights_[part][0] + half * kHalf, sizeof(weights_[part][0]));
      });
      for (int64_t d = 0; d < width_; d += amx::kColumns) {
        amx::load<0>(rows_.sums(row0) + d, sum_bytes);
        amx::load<6>(values(half, d), amx::kRowBytes);
        amx::unroll<kParts>(
            [&]<int part>() __attribute__((always_inline)) { amx::multiply<0, 1 + part, 6>(); });
        amx::store<0>(rows_.sums(row0) + d, sum_bytes);
      }
    }
  }

  void add_odd(int64_t row0, int size, const Odd& odd) const {
    for (int64_t row = row0; row < row0 + size; ++row)
      if (rows_.from(row) <= odd.key && odd.key < rows_.to(row))
        rows_.sums(row)[odd.place] += rows_.scores(row)[odd.key] * odd.value;
  }

  const AttentionArgs& args_;
  Scratch& s_;
  Keys& keys_;
  const int64_t steps_, width_;
  QueryRows rows_;
  int64_t count_ = 0;  // keys of the tile
  KeyTile<T> tile_;
  std::vector<Odd> odd_;
  alignas(64) bf16 weights_[kParts][amx::kRows][kKeys];
  amx::Block block_;
};

#endif

// Computes a run: by tiles or pairs of bf16 where they multiply what it has.
template <class T, class Keys>
void attend(const AttentionArgs& args, Scratch& scratch, Keys& keys, const QueryRun& run) {
  if constexpr (kMultipliesPairs && (std::is_same_v<T, bf16> || std::is_same_v<T, e4m3>)) {
    if (args.dtype == Dtype::bf16) {
#if defined(RBLN_TILES)
      return TileAttention<T, Keys>(args, scratch, keys, run).compute();
#else
      return Attention<T, bf16, Keys>(args, scratch, keys, run).compute();
#endif
    }
  }
  Attention<T, float, Keys>(args, scratch, keys, run).compute();
}

}  // namespace rbln
