// Weights into the panels that linear.cpp reads.
//
// bf16 neighbours along the depth share a 32-bit word, so that bf16 and f32 panels are alike:
// [steps][16 columns] of words, a transposed block of rows. f16 panels hold 16-bit words; they are
// transposed in pairs as well and taken apart while they are stored.
#include <memory>

#include "core/team.h"
#include "core/transpose.h"
#include "linear/linear.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 17;
constexpr int64_t kBlock = 8;

// Eight words of each of eight rows, `stride` elements apart, as columns.
template <class Word>
void load_columns(const Word* rows, int64_t stride, Eight::U (&block)[8]) {
  for (int i = 0; i < kBlock; ++i) block[i] = load_raw<Eight::U>(rows + i * stride);
  transpose(block);
}

void store_halves(uint16_t* panel, const Eight::U& pairs) {
  using H = VecTypes<8>::H;
  store_raw(panel, __builtin_convertvector(pairs & 0xffffu, H));
  store_raw(panel + kPanel, __builtin_convertvector(pairs >> 16, H));
}

// The first depths of a panel whose 16 columns all exist, as many as fill whole blocks; returns
// their number.
template <class Word>
int64_t pack_blocks(const Word* source, int64_t stride, int64_t depth, bool halves, Word* panel) {
  constexpr int64_t words = sizeof(uint32_t) / sizeof(Word), step = kBlock * words;
  int64_t t = 0;
  for (; t + step <= depth; t += step) {
    for (int64_t c = 0; c < kPanel; c += kBlock) {
      Eight::U block[8];
      load_columns(source + c * stride + t, stride, block);
      for (int i = 0; i < kBlock; ++i) {
        Word* row = panel + (t + i * words) * kPanel;
        if constexpr (words == 2) {
          if (halves) {
            store_halves(row + c, block[i]);
            continue;
          }
        }
        store_raw(row + c * words, block[i]);
      }
    }
  }
  return t;
}

template <class Word>
struct Packing {
  int64_t columns, depth, padded, pair;

  // One panel from its rows, `stride` elements apart; `count` of its columns exist.
  void panel(const Word* source, int64_t stride, int64_t count, Word* target) const {
    int64_t t = 0;
    if (count == kPanel) t = pack_blocks(source, stride, depth, pair == 1, target);
    for (; t < padded; ++t) {
      Word* row = target + t / pair * pair * kPanel + t % pair;
      for (int64_t c = 0; c < kPanel; ++c)
        row[c * pair] = c < count && t < depth ? source[c * stride + t] : Word(0);
    }
  }

  void all(const Word* source, int64_t stride, Word* target) const {
    parallel_for(panels_of(columns), 1, team_size(columns * depth, kSerialElements), [&](int64_t p) {
      const int64_t first = p * kPanel;
      panel(source + first * stride, stride, std::min(kPanel, columns - first),
            target + p * padded * kPanel);
    });
  }

  void in_place(Word* weight) const {
    const int64_t size = kPanel * depth;
    parallel_for(columns / kPanel, 1, team_size(columns * depth, kSerialElements), [&](int64_t p) {
      const auto rows = std::make_unique_for_overwrite<Word[]>(size_t(size));
      std::copy_n(weight + p * size, size, rows.get());
      panel(rows.get(), depth, kPanel, weight + p * size);
    });
  }
};

template <class Word>
Packing<Word> packing(Dtype dtype, int64_t columns, int64_t depth) {
  return {columns, depth, padded_depth(dtype, depth), dtype == Dtype::bf16 ? 2 : 1};
}

}  // namespace

void pack_weight(Dtype dtype, const void* weight, int64_t columns, int64_t depth,
                 int64_t column_stride, void* packed) {
  const auto pack = [&]<class Word>(const Word* source) {
    packing<Word>(dtype, columns, depth).all(source, column_stride, static_cast<Word*>(packed));
  };
  if (dtype == Dtype::f32) {
    pack(static_cast<const uint32_t*>(weight));
  } else {
    pack(static_cast<const uint16_t*>(weight));
  }
}

void pack_weight_in_place(Dtype dtype, void* weight, int64_t columns, int64_t depth) {
  if (dtype == Dtype::f32) {
    packing<uint32_t>(dtype, columns, depth).in_place(static_cast<uint32_t*>(weight));
  } else {
    packing<uint16_t>(dtype, columns, depth).in_place(static_cast<uint16_t*>(weight));
  }
}

}  // namespace rbln
