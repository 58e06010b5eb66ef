// Interleaves rows of every count that a tile has, for depths of up to a few vectors, and compares
// word by word; ends with 1 at a word that is wrong. The rows and the words fill their memory, so
// that a sanitizer sees what is read or written beyond them.
#include <cstdio>
#include <memory>

#include "linear/activations.h"

namespace {

using namespace rbln;

uint32_t half_at(const bf16* row, int64_t depth, int64_t t) { return t < depth ? row[t].bits : 0; }

template <int kWordDepth, class T>
uint32_t word_at(const T* row, int64_t depth, int64_t at) {
  if constexpr (kWordDepth == 1) return bit_cast<uint32_t>(to_float(row[at]));
  else return half_at(row, depth, 2 * at) | half_at(row, depth, 2 * at + 1) << 16;
}

template <class T, int kWordDepth>
bool is_right(int size, int64_t depth) {
  const int64_t words = (depth + kWordDepth - 1) / kWordDepth;
  std::unique_ptr<T[]> memory[kMaxTileRows];
  const T* rows[kMaxTileRows] = {};
  for (int r = 0; r < size; ++r) {
    memory[r].reset(new T[size_t(depth)]);
    for (int64_t t = 0; t < depth; ++t) {
      const uint32_t bits = uint32_t(r * 1000 + t + 1) * (sizeof(T) == 4 ? 4099 : 1);
      std::memcpy(&memory[r][size_t(t)], &bits, sizeof(T));
    }
    rows[r] = memory[r].get();
  }
  const std::unique_ptr<float[]> found(new float[size_t(words * size)]);
  interleave<kWordDepth>(rows, size, depth, words, found.get());
  for (int64_t i = 0; i < words * size; ++i)
    if (bit_cast<uint32_t>(found[size_t(i)]) !=
        word_at<kWordDepth>(rows[i % size], depth, i / size)) {
      std::printf("word %lld of %d rows of %lld elements of %zu bytes\n", (long long)(i / size),
                  size, (long long)depth, sizeof(T));
      return false;
    }
  return true;
}

}  // namespace

int main() {
  for (int size = 1; size <= kMaxTileRows; ++size)
    for (int64_t depth = 1; depth < 5 * kLanes; ++depth)
      if (!is_right<float, 1>(size, depth) || !is_right<f16, 1>(size, depth) ||
          !is_right<bf16, 1>(size, depth) || !is_right<bf16, 2>(size, depth))
        return 1;
}
