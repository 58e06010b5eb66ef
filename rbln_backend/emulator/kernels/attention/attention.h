// Attention over a cache of keys and values.
#pragma once

#include "core/types.h"

namespace rbln {

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

}  // namespace rbln
