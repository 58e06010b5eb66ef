// Which tokens of a row may be drawn.
#pragma once

#include <cstdint>

#include "sampling/weights.h"

namespace rbln {

// Kept are the scores above `score`, and of those equal to it the ones from `index` on, if they
// weigh at least `least`.
struct Cutoff {
  float score;
  int32_t index;
  float least;
};

// Limits of one row as in SampleArgs; a top_k of 0 and less is none.
struct Limits {
  int64_t top_k;
  float top_p, min_p;
};

// As vLLM's sampler: of scores equal to the k-th largest all are kept; what top_p adds up is the
// weight that min_p and top_k left, from the smallest on, of equal ones the first first, and it
// drops as long as the sum is at most 1 - top_p, but never the last.
Cutoff find_cutoff(const Scores& scores, const Limits& limits);

// What is kept of the units of the vector at `place`.
inline VecI kept_units(const Scores& scores, const Cutoff& cutoff, int64_t place) {
  const VecF score = load(scores.values + place);
  VecI lanes;
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  const VecI from = lanes + (int32_t(place) - cutoff.index) >= 0;
  const VecI keeps = (score > cutoff.score) | ((score == cutoff.score) & from);
  const VecF weight = weight_of(score, broadcast(scores.largest));
  return units_of(weight, broadcast(cutoff.least)) & keeps;
}

}  // namespace rbln
