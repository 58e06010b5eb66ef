// Weights into the panels that linear.cpp reads.
#include "kernels.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 17;

}  // namespace

void pack_weight(Dtype dtype, const void* weight, int64_t columns, int64_t depth,
                 int64_t column_stride, void* packed) {
  const int64_t panels = (columns + kPanel - 1) / kPanel;
  const int64_t padded = padded_depth(dtype, depth);
  const int64_t pair = dtype == Dtype::bf16 ? 2 : 1;
  const auto pack = [&]<class Word>(const Word* source, Word* target) {
    parallel_for(panels, 1, team_size(columns * depth, kSerialElements), [&](int64_t p) {
      Word* panel = target + p * padded * kPanel;
      for (int64_t t = 0; t < padded; ++t) {
        Word* row = panel + t / pair * pair * kPanel + t % pair;
        for (int64_t c = 0; c < kPanel; ++c) {
          const int64_t column = p * kPanel + c;
          const bool inside = column < columns && t < depth;
          row[c * pair] = inside ? source[column * column_stride + t] : Word(0);
        }
      }
    });
  };
  if (dtype == Dtype::f32) {
    pack(static_cast<const uint32_t*>(weight), static_cast<uint32_t*>(packed));
  } else {
    pack(static_cast<const uint16_t*>(weight), static_cast<uint16_t*>(packed));
  }
}

}  // namespace rbln
