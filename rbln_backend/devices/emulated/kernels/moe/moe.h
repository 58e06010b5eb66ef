// Mixture of experts on plain pointers; strides are in elements, as in types.h.
#pragma once

#include "core/types.h"
#include "quantized/quantized.h"

namespace rbln {

struct RouteArgs {
  Dtype dtype;
  const void* logits;  // [rows, experts], row stride
  int64_t rows, experts, stride, top_k;
  bool renormalize;           // the weights of a row sum to one
  const int32_t* expert_map;  // [experts]: numbers on this rank, -1 elsewhere; or null
  const float* tokens_mask;   // [rows]: 0 for padding, whose ids are all -1; or null
  float* weights;             // [rows, top_k]
  int32_t* ids;               // the same
};
void moe_route(const RouteArgs& args);

// The low-rank adapters of one projection of every expert.
struct ExpertLora {
  const void* a;                // each expert's [slots] packed matrices of [slices * rank, depth]
  const void* b[2];             // of each output slice, [columns, rank]; the second may be null
  int64_t a_elements, b_elements;  // of one packed matrix
};

// Adapters of rows; a row's products get the low-rank part of its adapter.
struct ExpertAdapters {
  const int32_t* slots;  // [requests]: each owns rows / requests rows; -1: no adapter; or null
  int64_t requests, slot_count, rank;
  ExpertLora first, second;
};

struct MoeArgs {
  Dtype dtype;
  const void* x;  // [rows, hidden_size], row stride
  int64_t rows, hidden_size, x_stride;
  const float* weights;  // [rows, top_k]
  const int32_t* ids;    // the same, distinct within a row; -1 stands for no expert
  int64_t top_k, experts, intermediate_size;
  const void *w13, *w13_bias;  // each expert's packed [2 * intermediate_size, hidden_size]; or null
  const void *w2, *w2_bias;    // each expert's packed [hidden_size, intermediate_size]; or null
  int64_t w13_elements, w2_elements;  // of one packed matrix
  // With words these are the first expert's matrices, the others' behind them, and w13 and w2 are
  // null.
  QuantizedWeight quantized_w13, quantized_w2;
  ExpertAdapters adapters;
  bool interleaved;  // gate and up alternate (SwiGLU of gpt-oss) instead of being halves (SiLU)
  void* out;         // [rows, hidden_size], contiguous
};
// Throws std::out_of_range for ids that name no expert, std::invalid_argument for repeated ones.
void moe(const MoeArgs& args);

// The same, with weights [rows, experts] in place of weights and ids (null; top_k is not read): a
// row goes to the experts with a weight that is not zero; experts with counts [experts] of 0 are
// skipped.
void moe_masked(const MoeArgs& args, const int32_t* counts);

}  // namespace rbln
