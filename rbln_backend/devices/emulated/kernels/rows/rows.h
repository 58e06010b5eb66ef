// Kernels that look at one row at a time.
#pragma once

#include "core/types.h"

namespace rbln {

struct NormArgs {
  Dtype dtype;
  const void* x;  // [rows / heads, heads, width]: heads lie together, x_stride apart their groups
  const void* residual;  // the same with residual_stride, or null
  int64_t rows, width, heads, x_stride, residual_stride;
  const void* weight;  // [width], of dtype or (weight_is_f32) float
  bool weight_is_f32;
  float epsilon;
  void* out;           // [rows, width], contiguous
  void* residual_out;  // the same, or null
};
void rms_norm(const NormArgs& args);

struct LayerNormArgs {
  Dtype dtype;
  const void* x;  // [rows, width], row stride x_stride
  int64_t rows, width, x_stride;
  const void *weight, *bias;  // [width] of dtype, or null
  float epsilon;
  void* out;  // [rows, width], contiguous
};
void layer_norm(const LayerNormArgs& args);

enum class Activation { silu, gelu, gelu_tanh, quick_gelu, relu2, sigmoid, softplus };

struct ActivationArgs {
  Dtype dtype;
  Activation function;
  bool gated;     // function(first half of a row) * second half
  const void* x;  // [rows, width] or (gated) [rows, 2 * width], row stride x_stride
  int64_t rows, width, x_stride;
  void* out;  // [rows, width], contiguous
};
void activate(const ActivationArgs& args);

struct RotaryArgs {
  Dtype dtype;
  const int64_t* positions;  // [rows], checked by the caller
  const void* cache;         // [max_position, rotary_dim]: cosines, then sines; of dtype
  int64_t cache_stride, rotary_dim, head_size;
  bool is_neox;
  int64_t rows;
  struct Side {
    const void* x;  // [rows, heads * head_size], row stride
    int64_t heads, stride;
    void* out;  // contiguous
  } sides[2];
};
void rotary_embedding(const RotaryArgs& args);

struct GreedyArgs {
  Dtype dtype;
  const void* x;  // [rows, width], row stride x_stride
  int64_t rows, width, x_stride;
  int32_t* out;  // [rows]: the first index of the row's largest value; 0 in a row of NaN
};
void greedy(const GreedyArgs& args);

}  // namespace rbln
