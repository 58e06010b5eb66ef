// Attention over tensors: layers/attention_ops.py and devices/emulated/ops.py say what the ops compute.
#include <torch/library.h>

#include "bindings/attention_call.h"

namespace rbln::bindings {
namespace {

Sizes check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache,
                      const Tensor& tables) {
  TORCH_CHECK(q.dim() == 5 && k.dim() == 5 && v.dim() == 5 && cache.dim() == 6 &&
                  v.sizes().slice(0, 4) == k.sizes().slice(0, 4) && v.size(4) <= k.size(4),
              "expected q [B,Hkv,G,L,D], k and v [B,Hkv,1,L,D], kv_cache [N,2,Hkv,1,S,D], got ",
              q.sizes(), ", ", k.sizes(), ", ", v.sizes(), ", ", cache.sizes());
  for (const Tensor* tensor : {&k, &v}) check_dtype(*tensor, "k or v", q);
  TORCH_CHECK(k.size(0) == q.size(0) && k.size(1) == q.size(1) && k.size(2) == 1 &&
                  k.size(3) == q.size(3) && k.size(4) == q.size(4) && cache.size(1) == 2 &&
                  cache.size(2) == q.size(1) && cache.size(3) == 1 && cache.size(5) == q.size(4),
              "q ", q.sizes(), ", k ", k.sizes(), " and kv_cache ", cache.sizes(), " disagree");
  TORCH_CHECK(q.stride(4) == 1 && k.stride(4) == 1 && v.stride(4) == 1 && cache.stride(5) == 1,
              "the head dimension of q, k, v and kv_cache must be contiguous");
  check_tables(tables, q.size(0));
  return {q.size(0), q.size(1), q.size(2), q.size(3), q.size(4), v.size(4)};
}

Tensor flash_causal(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                    const Tensor& scale, const Tensor& seq_idx, const Tensor& block_tables,
                    const Tensor& /*slot_mapping*/, const std::optional<Tensor>& sinks,
                    std::optional<double> soft_cap, const std::optional<Tensor>& slopes,
                    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                    std::optional<int64_t> chunk, std::optional<int64_t> window,
                    const std::optional<Tensor>& counts) {
  const Sizes sizes = check_attention(q, k, v, kv_cache, block_tables);
  AttentionCall call(sizes, heads_of(q), heads_of(k), heads_of(v), kv_cache, scale,
                     {sinks, soft_cap, slopes, k_scale, v_scale, chunk, window, counts});
  call.run_causal(seq_idx, block_tables, kv_cache);
  return call.result();
}

// The one-block ops take seq_idx before scale.
Tensor one_block_causal(const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& kv_cache, const Tensor& seq_idx, const Tensor& scale,
                        const Tensor& block_tables, const Tensor& dummy,
                        const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                        const std::optional<Tensor>& slopes,
                        const std::optional<Tensor>& k_scale,
                        const std::optional<Tensor>& v_scale, std::optional<int64_t> chunk,
                        std::optional<int64_t> window, const std::optional<Tensor>& counts) {
  return flash_causal(q, k, v, kv_cache, scale, seq_idx, block_tables, dummy, sinks, soft_cap,
                      slopes, k_scale, v_scale, chunk, window, counts);
}

Tensor window_prefill(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                      const Tensor& cache_seq_len, const Tensor& cache_offset,
                      const Tensor& scale, const Tensor& block_tables, const Tensor& /*dummy*/,
                      const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                      const std::optional<Tensor>& slopes, const std::optional<Tensor>& k_scale,
                      const std::optional<Tensor>& v_scale, const std::optional<Tensor>& counts) {
  const Sizes sizes = check_attention(q, k, v, kv_cache, block_tables);
  AttentionCall call(sizes, heads_of(q), heads_of(k), heads_of(v), kv_cache, scale,
                     {sinks, soft_cap, slopes, k_scale, v_scale, {}, {}, counts});
  call.run_window(cache_seq_len, cache_offset, block_tables, kv_cache);
  return call.result();
}

// The mask says again what cache_seq_len says.
Tensor window_decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                     const Tensor& cache_seq_len, const Tensor& cache_offset, const Tensor& scale,
                     const Tensor& block_tables, const Tensor& dummy,
                     const std::optional<Tensor>& /*attn_mask*/,
                     const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                     const std::optional<Tensor>& slopes, const std::optional<Tensor>& k_scale,
                     const std::optional<Tensor>& v_scale, const std::optional<Tensor>& counts) {
  return window_prefill(q, k, v, kv_cache, cache_seq_len, cache_offset, scale, block_tables, dummy,
                        sinks, soft_cap, slopes, k_scale, v_scale, counts);
}

// Another layer of the same step has written the keys and values.
Tensor shared_attention(const Tensor& q, const Tensor& kv_cache, const Tensor& scale,
                        const Tensor& seq_idx, const Tensor& block_tables,
                        const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                        const std::optional<Tensor>& slopes,
                        const std::optional<Tensor>& k_scale,
                        const std::optional<Tensor>& v_scale, std::optional<int64_t> chunk,
                        std::optional<int64_t> window, const std::optional<Tensor>& counts) {
  const Tensor rows = q.narrow(2, 0, 1);  // for their shape: none is written
  const Sizes sizes = check_attention(q, rows, rows, kv_cache, block_tables);
  AttentionCall call(sizes, heads_of(q), heads_of(rows), heads_of(rows), kv_cache, scale,
                     {sinks, soft_cap, slopes, k_scale, v_scale, chunk, window, counts});
  call.args.k_size = call.args.v_size = 0;
  call.run_causal(seq_idx, block_tables, kv_cache);
  return call.result();
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_emulated_ops, CPU, m) {
  m.impl("flash_causal_attention_naive_prefill", TORCH_FN(flash_causal));
  m.impl("flash_causal_attention_naive_decode", TORCH_FN(flash_causal));
  m.impl("causal_attention_naive_prefill", TORCH_FN(one_block_causal));
  m.impl("causal_attention_naive_decode", TORCH_FN(one_block_causal));
  m.impl("sliding_window_attention_naive_prefill", TORCH_FN(window_prefill));
  m.impl("sliding_window_attention_naive_decode", TORCH_FN(window_decode));
}

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("shared_attention", TORCH_FN(shared_attention));
}

}  // namespace rbln::bindings
