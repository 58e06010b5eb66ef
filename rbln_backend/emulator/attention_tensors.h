// The attention ops over tensors; attention/ops.py and emulator/ops.py say what they compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace rbln {

at::Tensor flash_causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& kv_cache, const at::Tensor& scale,
                        const at::Tensor& seq_idx, const at::Tensor& block_tables,
                        const at::Tensor& slot_mapping, const std::optional<at::Tensor>& sinks,
                        std::optional<double> soft_cap);

// The one-block ops take seq_idx before scale.
at::Tensor one_block_causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& kv_cache, const at::Tensor& seq_idx,
                            const at::Tensor& scale, const at::Tensor& block_tables,
                            const at::Tensor& dummy, const std::optional<at::Tensor>& sinks,
                            std::optional<double> soft_cap);

at::Tensor window_prefill(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& kv_cache, const at::Tensor& cache_seq_len,
                          const at::Tensor& cache_offset, const at::Tensor& scale,
                          const at::Tensor& block_tables, const at::Tensor& dummy,
                          const std::optional<at::Tensor>& sinks, std::optional<double> soft_cap);

// The mask says again what cache_seq_len says.
at::Tensor window_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const at::Tensor& kv_cache, const at::Tensor& cache_seq_len,
                         const at::Tensor& cache_offset, const at::Tensor& scale,
                         const at::Tensor& block_tables, const at::Tensor& dummy,
                         const std::optional<at::Tensor>& attn_mask,
                         const std::optional<at::Tensor>& sinks, std::optional<double> soft_cap);

at::Tensor self_attention(const at::Tensor& q, int64_t q_column, const at::Tensor& k,
                          int64_t k_column, const at::Tensor& v, int64_t v_column,
                          const std::optional<at::Tensor>& q_norm,
                          const std::optional<at::Tensor>& k_norm, double eps,
                          const std::optional<at::Tensor>& positions,
                          const std::optional<at::Tensor>& cos_sin_cache, bool is_neox,
                          const at::Tensor& kv_cache, const at::Tensor& scale,
                          const at::Tensor& starts, const std::optional<at::Tensor>& ends,
                          const at::Tensor& block_tables, const std::optional<at::Tensor>& sinks,
                          std::optional<double> soft_cap, int64_t group, int64_t batch);

}  // namespace rbln
