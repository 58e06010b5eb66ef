// Draws a token of each row: scores once, a cutoff where there are limits, then one number of the
// kept weights' sum, whose place lies in the token that is drawn.
#include <algorithm>
#include <vector>

#include "core/simd.h"
#include "core/team.h"
#include "sampling/cutoff.h"
#include "sampling/sampling.h"
#include "sampling/scores.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 14;
constexpr int64_t kBlock = 512;  // tokens whose sum is kept

// 0 in a row without any.
int32_t first_of_largest(const Scores& scores) {
  if (scores.largest == kLowest) return 0;
  for (int64_t i = 0; i < scores.width; i += kLanes) {
    const uint32_t equal = lane_mask(load(scores.values + i) == scores.largest);
    if (equal != 0) return int32_t(i) + __builtin_ctz(equal);
  }
  return 0;
}

// The token in whose share of the kept units the number lies that is to all of them as `random`
// is to 2^64.
int32_t draw(const Scores& scores, const Cutoff& cutoff, uint64_t random) {
  thread_local std::vector<uint64_t> sums;
  sums.clear();
  uint64_t total = 0;
  for (int64_t begin = 0; begin < scores.width; begin += kBlock) {
    UnitSum sum;
    const int64_t end = std::min(scores.width, begin + kBlock);
    for (int64_t i = begin; i < end; i += kLanes) sum.add(kept_units(scores, cutoff, i));
    sums.push_back(sum.total());
    total += sums.back();
  }
  if (total == 0) return first_of_largest(scores);
  uint64_t left = uint64_t(static_cast<unsigned __int128>(random) * total >> 64);
  size_t block = 0;
  for (; left >= sums[block]; ++block) left -= sums[block];
  for (int64_t i = int64_t(block) * kBlock;; i += kLanes) {
    const VecI units = kept_units(scores, cutoff, i);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (left < uint64_t(units[lane])) return int32_t(i) + lane;
      left -= uint64_t(units[lane]);
    }
  }
}

int32_t sample_row(const SampleArgs& args, int64_t row, const Scores& scores) {
  const int64_t top_k = args.top_k == nullptr ? args.width : args.top_k[row];
  const Limits limits{top_k < args.width ? top_k : 0,
                      args.top_p == nullptr ? 1.0f : args.top_p[row],
                      args.min_p == nullptr ? 0.0f : args.min_p[row]};
  return draw(scores, find_cutoff(scores, limits), uint64_t(args.randoms[row]));
}

}  // namespace

void sample(const SampleArgs& args) {
  RBLN_DISPATCH(args.dtype, T, {
    const int threads = team_size(args.rows * args.width, kSerialElements);
    parallel_for(args.rows, 1, threads, [&](int64_t r) {
      const bool is_greedy = !(args.temperature[r] >= kGreedyTemperature);
      const T* row = static_cast<const T*>(args.x) + r * args.x_stride;
      const Scores scores = scores_of(row, args.width, is_greedy ? 1.0f : args.temperature[r]);
      args.out[r] = is_greedy ? first_of_largest(scores) : sample_row(args, r, scores);
    });
  });
}

}  // namespace rbln
