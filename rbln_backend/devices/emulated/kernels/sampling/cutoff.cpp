// Selection instead of a sort: bounds from maxima or a histogram, then the exact candidates alone.
#include "sampling/cutoff.h"

#include <algorithm>
#include <vector>

#include "sampling/candidates.h"

namespace rbln {
namespace {

// The least of `from`, in ascending order, up to which more than `limit` units add up.
Candidate first_beyond(std::vector<Candidate>& from, uint64_t limit) {
  auto low = from.begin(), high = from.end();
  uint64_t below = 0;
  while (high - low > 1) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high);
    uint64_t sum = below;
    for (auto each = low; each != middle; ++each) sum += uint64_t(each->units);
    if (sum > limit) {
      high = middle;
    } else {
      low = middle;
      below = sum;
    }
  }
  return *low;
}

// How many units may be dropped; fewer than all of them.
uint64_t droppable(uint64_t total, float top_p) {
  const uint64_t limit = uint64_t(double(1.0f - top_p) * double(total));
  return std::min(limit, total - 1);
}

// Units by distance from the largest score.
class Histogram {
 public:
  static constexpr int kBins = 1536;

  static VecI bin_of(VecF score, VecF largest) {
    const VecF distance = min((largest - score) * 64.0f, broadcast(float(kBins - 1)));
    return __builtin_convertvector(distance, VecI);
  }

  explicit Histogram(const Scores& scores, float least) {
    const VecF largest = broadcast(scores.largest), smallest = broadcast(least);
    for (int64_t i = 0; i < scores.width; i += kLanes) {
      const VecF score = load(scores.values + i);
      const VecI units = units_of(weight_of(score, largest), smallest);
      if (lane_mask(units > 0) == 0) continue;
      const VecI bins = bin_of(score, largest);
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) units_[bins[lane]] += uint64_t(units[lane]);
    }
  }

  uint64_t total() const {
    uint64_t sum = 0;
    for (uint64_t units : units_) sum += units;
    return sum;
  }

  // The bin in which more than `limit` units have added up, from the smallest on; `limit` becomes
  // what is left of it for that bin.
  int bin_beyond(uint64_t& limit) const {
    int bin = kBins - 1;
    for (; bin > 0 && units_[bin] <= limit; --bin) limit -= units_[bin];
    return bin;
  }

 private:
  uint64_t units_[kBins] = {};
};

// The k-th largest score; `candidates` become those that are no less.
float largest_of_k(const Scores& scores, const Limits& limits, std::vector<Candidate>& candidates) {
  const VecF bound = broadcast(bound_of_largest(scores, limits.top_k));
  gather(scores, limits.min_p, [&](VecF score) { return score >= bound; }, candidates);
  if (int64_t(candidates.size()) < limits.top_k) return kLowest;
  const auto place = candidates.end() - limits.top_k;
  std::nth_element(candidates.begin(), place, candidates.end());
  const float score = place->score;
  std::erase_if(candidates, [&](const Candidate& each) { return each.score < score; });
  return score;
}

}  // namespace

Cutoff find_cutoff(const Scores& scores, const Limits& limits) {
  thread_local std::vector<Candidate> candidates;
  Cutoff cutoff{kLowest, 0, limits.min_p};
  uint64_t limit = 0;
  if (limits.top_k > 0) {
    cutoff.score = largest_of_k(scores, limits, candidates);
    if (limits.top_p >= 1.0f) return cutoff;
    uint64_t total = 0;
    for (const Candidate& each : candidates) total += uint64_t(each.units);
    if (total == 0) return cutoff;
    limit = droppable(total, limits.top_p);
  } else {
    if (limits.top_p >= 1.0f) return cutoff;
    const Histogram histogram(scores, limits.min_p);
    const uint64_t total = histogram.total();
    if (total == 0) return cutoff;
    limit = droppable(total, limits.top_p);
    const int bin = histogram.bin_beyond(limit);
    const VecF largest = broadcast(scores.largest);
    const auto in_bin = [&](VecF score) { return Histogram::bin_of(score, largest) == bin; };
    gather(scores, limits.min_p, in_bin, candidates);
  }
  const Candidate first = first_beyond(candidates, limit);
  return {first.score, first.index, limits.min_p};
}

}  // namespace rbln
