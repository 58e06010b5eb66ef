// Penalties: only the logits of tokens that a row has had are read or written.
#include <vector>

#include "core/team.h"
#include "sampling/sampling.h"

namespace rbln {
namespace {

constexpr int64_t kSerialTokens = 1 << 12;

// How often a row has had each token; empty again after every row.
struct Tally {
  static constexpr int32_t kInPrompt = 1 << 30;

  std::vector<int32_t> counts;  // of outputs, and kInPrompt
  std::vector<int64_t> seen;

  void add(int64_t token, int32_t what) {
    if (token < 0 || token >= int64_t(counts.size())) return;
    int32_t& count = counts[size_t(token)];
    if (count == 0) seen.push_back(token);
    // A token that a prompt has twice is in it.
    if (what != kInPrompt || count == 0) count += what;
  }
};

void penalize_row(const PenaltyArgs& args, int64_t row, Tally& tally) {
  const float presence = args.presence[row], frequency = args.frequency[row];
  const float repetition = args.repetition[row];
  if (repetition != 1.0f) {
    const int64_t* prompt = args.prompts + row * args.prompt_width;
    for (int64_t i = 0; i < args.prompt_width; ++i) tally.add(prompt[i], Tally::kInPrompt);
  }
  for (int64_t i = row == 0 ? 0 : args.output_ends[row - 1]; i < args.output_ends[row]; ++i)
    tally.add(args.outputs[i], 1);
  float* x = args.x + row * args.x_stride;
  for (const int64_t token : tally.seen) {
    int32_t& count = tally.counts[size_t(token)];
    const int32_t outputs = count & (Tally::kInPrompt - 1);
    count = 0;
    // In vLLM's order and with its roundings.
    float value = x[token] * (x[token] > 0 ? 1.0f / repetition : repetition);
    value = value - frequency * float(outputs);
    x[token] = value - presence * float(outputs > 0);
  }
  tally.seen.clear();
}

}  // namespace

void penalize(const PenaltyArgs& args) {
  const int64_t tokens = args.rows * args.prompt_width + args.output_ends[args.rows - 1];
  parallel_for(args.rows, 1, team_size(tokens, kSerialTokens), [&](int64_t row) {
    thread_local Tally tally;
    if (int64_t(tally.counts.size()) != args.width) tally.counts.assign(size_t(args.width), 0);
    if (args.presence[row] == 0.0f && args.frequency[row] == 0.0f && args.repetition[row] == 1.0f)
      return;
    penalize_row(args, row, tally);
  });
}

}  // namespace rbln
