// The kernels' plain-pointer interface: what library.cpp calls and the kernel files define.
//
// Strides are in elements and the innermost dimension is always contiguous. Nothing here depends
// on torch, so the kernel files compile in seconds.
#pragma once

#include <cstdint>

#include "team.h"

namespace rbln {

enum class Dtype { f32, bf16, f16 };

// Columns of one packed weight panel, in every layout and on every instruction set.
inline constexpr int64_t kPanel = 16;

// Rows per claimed item of the kernels that do little work per row.
inline constexpr int64_t kRowsAtOnce = 4;

// Handing out work costs microseconds: it is either this thread alone or the whole team.
inline int team_size(int64_t work, int64_t least_parallel_work) {
  return work < least_parallel_work ? 1 : team_threads();
}

struct LinearArgs {
  Dtype dtype;
  const void* x;  // [rows, depth], row stride x_stride
  int64_t rows, depth, x_stride;
  const void* packed;  // see pack_weight
  const void* bias;    // [columns] or null
  int64_t columns;
  void* out;  // [rows, columns], contiguous
};
void linear(const LinearArgs& args);

// Depth rows of a packed weight: bf16 neighbours along the depth share a word.
inline int64_t padded_depth(Dtype dtype, int64_t depth) {
  return dtype == Dtype::bf16 ? (depth + 1) / 2 * 2 : depth;
}

// weight [columns, depth] -> f32, f16: [columns/16, depth, 16]; bf16: [columns/16, depth/2, 16, 2].
// Both counts are rounded up and the fill is zero.
void pack_weight(Dtype dtype, const void* weight, int64_t columns, int64_t depth,
                 int64_t column_stride, void* packed);

// The same where the weight lies: [columns, depth], contiguous, both counts as they come out.
void pack_weight_in_place(Dtype dtype, void* weight, int64_t columns, int64_t depth);

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

struct TokenStrides {
  int64_t batch, head, group, token;
};

struct AttentionArgs {
  Dtype dtype;
  const void *q, *k, *v;
  TokenStrides q_stride, k_stride, v_stride;
  void* cache;
  struct {
    int64_t block, kv, head, slot;
  } cache_stride;
  int64_t batch, kv_heads, group, length, head_size, block_size, table_width;
  const int64_t* starts;  // [batch]: tokens cached before
  const int64_t* counts;  // [batch]: real new tokens, of `length`; window_attention alone reads it
  const int64_t* tables;  // [batch, table_width], checked by the caller where they are used
  float scale;
  float soft_cap;      // scaled scores s become cap * tanh(s / cap); 0 leaves them
  const float* sinks;  // [kv_heads, group] or null
  void* out;           // [batch, length, kv_heads, group, head_size], contiguous
};
void causal_attention(const AttentionArgs& args);
// One block per request (table_width 1); block_size is the window.
void window_attention(const AttentionArgs& args);

// Calls f(T*) for the element type: a null pointer that carries the type.
#define RBLN_DISPATCH(dtype, T, ...)   \
  switch (dtype) {                     \
    case ::rbln::Dtype::f32: {         \
      using T = float;                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case ::rbln::Dtype::bf16: {        \
      using T = ::rbln::bf16;          \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case ::rbln::Dtype::f16: {         \
      using T = ::rbln::f16;           \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
  }

}  // namespace rbln
