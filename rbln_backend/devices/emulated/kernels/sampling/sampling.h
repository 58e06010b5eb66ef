// Sampling on plain pointers: rows of logits in, a token or a few of each out.
#pragma once

#include "core/types.h"

namespace rbln {

struct SampleArgs {
  Dtype dtype;
  const void* x;  // [rows, width], row stride x_stride
  int64_t rows, width, x_stride;
  const float* temperature;  // [rows]; below kGreedyTemperature: the first of the largest values
  const int32_t* top_k;      // [rows], or null; no limit outside of 1..width - 1
  const float *top_p, *min_p;  // [rows], or null; no limit from 1 up, and down from 0
  const int64_t* randoms;      // [rows]: 64 random bits each
  int32_t* out;                // [rows]
};
void sample(const SampleArgs& args);

struct PenaltyArgs {
  float* x;  // [rows, width], row stride x_stride
  int64_t rows, width, x_stride;
  const int64_t* prompts;  // [rows, prompt_width]; numbers that are no token are padding
  int64_t prompt_width;
  const int32_t* outputs;     // of all rows, one after another
  const int64_t* output_ends;  // [rows]
  const float *presence, *frequency, *repetition;  // [rows]
};
void penalize(const PenaltyArgs& args);

struct TopLogprobsArgs {
  Dtype dtype;
  const void* x;  // [rows, width], row stride x_stride
  int64_t rows, width, x_stride;
  const int32_t* tokens;  // [rows], of 0..width - 1
  int64_t count;          // of the likeliest tokens
  bool is_normalized;     // log-probabilities, else the logits
  int32_t* ids;           // [rows, 1 + count]: the row's token, then the likeliest, best first
  float* values;          // [rows, 1 + count]
  int64_t* ranks;         // [rows]: how many tokens are no less likely than the row's
};
void top_logprobs(const TopLogprobsArgs& args);

inline constexpr float kGreedyTemperature = 1e-5f;

}  // namespace rbln
