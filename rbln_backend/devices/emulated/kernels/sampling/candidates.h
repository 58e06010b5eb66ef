// Tokens of a row that are looked at one by one, and the bound that leaves few of them.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "sampling/weights.h"

namespace rbln {

struct Candidate {
  float score;
  int32_t index;
  int32_t units;

  bool operator<(const Candidate& other) const {
    return score < other.score || (score == other.score && index < other.index);
  }
};

// Those of the row for whose vector of scores `chooses` is true, in the order of their index.
template <class Chooses>
void gather(const Scores& scores, float least, const Chooses& chooses, std::vector<Candidate>& to) {
  to.clear();
  for (int64_t i = 0; i < scores.width; i += kLanes) {
    const VecF score = load(scores.values + i);
    uint32_t chosen = lane_mask(chooses(score));
    if (chosen == 0) continue;
    const VecI units = units_of(weight_of(score, broadcast(scores.largest)), broadcast(least));
    for (; chosen != 0; chosen &= chosen - 1) {
      const int lane = __builtin_ctz(chosen);
      to.push_back({score[lane], int32_t(i) + lane, units[lane]});
    }
  }
}

// No more than the k-th largest score: the k-th largest of the maxima of groups.
inline float bound_of_largest(const Scores& scores, int64_t k) {
  thread_local std::vector<float> maxima;
  // Few maxima are soon selected from, and few groups have two of the k largest.
  const int64_t vectors = std::clamp<int64_t>(scores.width / (8 * k), 1, 64);
  maxima.clear();
  for (int64_t i = 0; i < scores.width; i += vectors * kLanes) {
    const int64_t end = std::min(scores.width, i + vectors * kLanes);
    VecF found = broadcast(kLowest);
    for (int64_t j = i; j < end; j += kLanes) found = max(load(scores.values + j), found);
    for (int lane = 0; lane < kLanes; ++lane) maxima.push_back(found[lane]);
  }
  if (int64_t(maxima.size()) < k) return kLowest;
  const auto place = maxima.begin() + (k - 1);
  std::nth_element(maxima.begin(), place, maxima.end(), std::greater<float>());
  return *place;
}

}  // namespace rbln
