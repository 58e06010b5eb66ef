// Attention over a cache of keys and values.
#pragma once

#include "core/types.h"

namespace rbln {

struct TokenStrides {
  int64_t batch, head, group, token;
};

struct AttentionArgs {
  Dtype dtype;   // of q and out, and of k, v and the cache
  bool is_e4m3;  // unless those three are of e4m3 (core/e4m3.h)
  const void *q, *k, *v;
  TokenStrides q_stride, k_stride, v_stride;
  void* cache;
  struct {
    int64_t block, kv, head, slot;  // kv: from a key to its value, 0 where values begin keys
  } cache_stride;
  int64_t batch, kv_heads, group, length;
  int64_t head_size;   // of queries and of keys in the cache
  int64_t value_size;  // of values and of results, at most head_size
  // Data of a new token: k_size numbers of k, then v_size of v at offset v_place.
  int64_t k_size, v_size, v_place;
  int64_t block_size, table_width;
  const int64_t* starts;  // [batch]: tokens before the new ones
  const int64_t* counts;  // [batch]: real new tokens, of `length`; window_attention alone reads it
  const int64_t* tables;  // [batch, table_width], checked by the caller where they are used
  float scale;    // of q times k as they are stored
  float v_scale;  // of values as they are stored
  float soft_cap;       // scaled scores s become cap * tanh(s / cap); 0 leaves them
  const float* sinks;   // [kv_heads, group] or null
  const float* slopes;  // the same: a score grows by it with every position (ALiBi); or null
  // Of causal_attention alone; 0 is no bound.
  int64_t chunk;   // tokens see their own chunk of so many
  int64_t window;  // tokens see the last so many
  bool writes_only;  // the new keys and values are written, and nothing is computed
  void* out;            // [batch, length, kv_heads, group, value_size], contiguous
};
// Heads of new tokens as a cache of e4m3 keeps them: divided by `scale`, at most 448.
struct E4m3Args {
  Dtype dtype;
  const void* rows;
  TokenStrides stride;
  int64_t batch, length, heads, size;
  float scale;
  void* out;  // [batch, length, heads, size], contiguous
};
void to_e4m3(const E4m3Args& args);

void causal_attention(const AttentionArgs& args);
// One block per request (table_width 1); block_size is the window.
void window_attention(const AttentionArgs& args);

}  // namespace rbln
