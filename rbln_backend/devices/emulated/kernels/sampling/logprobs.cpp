// Log-probabilities of a row's token and of the likeliest ones; those of others are never made.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/team.h"
#include "sampling/candidates.h"
#include "sampling/sampling.h"
#include "sampling/scores.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 14;
constexpr int64_t kBlock = 512;

// Logarithm of the sum of e^score; sixteen sums per block, then one after the other in float64: the
// same on every instruction set.
double log_sum(const Scores& scores) {
  constexpr int kParts = int(kPanel) / kLanes;
  const VecF largest = broadcast(scores.largest);
  double sum = 0.0;
  for (int64_t begin = 0; begin < scores.width; begin += kBlock) {
    VecF parts[kParts] = {};
    const int64_t end = std::min(scores.width, begin + kBlock);
    for (int64_t i = begin; i < end; i += kPanel)
      for (int part = 0; part < kParts; ++part) {
        const VecF score = load(scores.values + i + part * kLanes);
        parts[part] = parts[part] + weight_of(score, largest);
      }
    for (int part = 0; part < kParts; ++part)
      for (int lane = 0; lane < kLanes; ++lane) sum += double(parts[part][lane]);
  }
  return double(scores.largest) + std::log(sum);
}

int64_t count_from(const Scores& scores, float least) {
  VecI counts{};
  for (int64_t i = 0; i < scores.width; i += kLanes)
    counts = counts - (load(scores.values + i) >= least);
  int64_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += counts[lane];
  return sum;
}

bool is_likelier(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.index < b.index);
}

void report_row(const TopLogprobsArgs& args, int64_t row, const Scores& scores) {
  thread_local std::vector<Candidate> likeliest;
  const float own = scores.values[args.tokens[row]];
  const double shift = args.is_normalized ? log_sum(scores) : 0.0;
  int32_t* ids = args.ids + row * (1 + args.count);
  float* values = args.values + row * (1 + args.count);
  ids[0] = args.tokens[row];
  values[0] = float(double(own) - shift);
  args.ranks[row] = own == kLowest ? args.width : count_from(scores, own);
  if (args.count == 0) return;
  const VecF bound = broadcast(bound_of_largest(scores, args.count));
  gather(scores, 0.0f, [&](VecF score) { return score >= bound; }, likeliest);
  // Padding has the lowest score and the highest indices, so that it comes last.
  const int64_t found = std::min<int64_t>(args.count, int64_t(likeliest.size()));
  std::partial_sort(likeliest.begin(), likeliest.begin() + found, likeliest.end(), is_likelier);
  for (int64_t i = 0; i < args.count; ++i) {
    // Fewer are found in rows with NaN.
    const Candidate each = i < found ? likeliest[size_t(i)] : Candidate{kLowest, 0, 0};
    ids[1 + i] = each.index < args.width ? each.index : 0;
    values[1 + i] = float(double(each.score) - shift);
  }
}

}  // namespace

void top_logprobs(const TopLogprobsArgs& args) {
  RBLN_DISPATCH(args.dtype, T, {
    const int threads = team_size(args.rows * args.width, kSerialElements);
    parallel_for(args.rows, 1, threads, [&](int64_t r) {
      const T* row = static_cast<const T*>(args.x) + r * args.x_stride;
      report_row(args, r, scores_of(row, args.width, 1.0f));
    });
  });
}

}  // namespace rbln
