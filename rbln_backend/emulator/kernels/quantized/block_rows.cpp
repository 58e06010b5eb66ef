// Single columns of a weight of blocks: the rows of an embedding.
#include <algorithm>

#include "core/team.h"
#include "quantized/blocks.h"

namespace rbln {
namespace {

constexpr int64_t kSerialWork = 1 << 15;  // numbers worth less than waking the team

float as_float(float value) { return value; }
float as_float(f16 value) { return half_to_float(value.bits); }
float as_float(bf16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

// Where a word of blocks4 has the number at `depth`.
int place_of(int64_t depth) { return int(16 * (depth & 1) + 4 * (depth >> 1 & 3)); }

template <class S>
void expand_row(const QuantizedWeight& weight, int64_t column, int64_t depth, float* out) {
  const int64_t panel = column / kPanel, lane = column % kPanel, groups = depth / weight.group;
  const bool is_short = weight.format == Format::blocks4;
  const int64_t count = is_short ? 8 : 4;
  const uint32_t* words = weight.words + panel * (depth / count) * kPanel + lane;
  const auto* scales = static_cast<const S*>(weight.scales) + panel * groups * kPanel + lane;
  const auto* minima = static_cast<const S*>(weight.minima);
  if (minima != nullptr) minima += panel * groups * kPanel + lane;
  const float less = is_short && minima == nullptr ? Blocks4::kMiddle : 0.0f;
  for (int64_t t = 0; t < depth; ++t) {
    const uint32_t word = words[t / count * kPanel];
    const int number =
        is_short ? int(word >> place_of(t) & 15u) : int(int8_t(word >> (8 * (t & 3))));
    const int64_t at = t / weight.group * kPanel;
    const float minimum = minima == nullptr ? 0.0f : as_float(minima[at]);
    out[t] = (float(number) - less) * as_float(scales[at]) + minimum;
  }
}

}  // namespace

void block_rows(const BlockRowsArgs& args) {
  const int threads = team_size(args.count * args.depth, kSerialWork);
  parallel_for(args.count, 1, threads, [&](int64_t i) {
    float* const out = args.out + i * args.depth;
    const int64_t id = args.ids[i];
    if (id < 0 || id >= args.columns) {
      std::fill_n(out, args.depth, 0.0f);
      return;
    }
    RBLN_DISPATCH(args.weight.scale_dtype, S, expand_row<S>(args.weight, id, args.depth, out));
  });
}

}  // namespace rbln
