// The mixture-of-experts ops over tensors; emulator/ops.py says what they compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace rbln {

std::tuple<at::Tensor, at::Tensor> moe_route_tensors(const at::Tensor& logits, int64_t top_k,
                                                     bool renormalize,
                                                     const std::optional<at::Tensor>& expert_map,
                                                     const std::optional<at::Tensor>& tokens_mask);

at::Tensor moe_tensors(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& ids,
                       const at::Tensor& w13, const std::optional<at::Tensor>& w13_bias,
                       const at::Tensor& w2, const std::optional<at::Tensor>& w2_bias,
                       int64_t intermediate_size, std::string_view activation);

at::Tensor moe_masked_tensors(const at::Tensor& x, const at::Tensor& weights,
                              const at::Tensor& counts, const at::Tensor& w13,
                              const std::optional<at::Tensor>& w13_bias, const at::Tensor& w2,
                              const std::optional<at::Tensor>& w2_bias, int64_t intermediate_size,
                              std::string_view activation);

at::Tensor quantized_moe_tensors(const at::Tensor& x, const at::Tensor& weights,
                                 const at::Tensor& ids, const at::Tensor& w13,
                                 const at::Tensor& w13_scales,
                                 const std::optional<at::Tensor>& w13_bias, const at::Tensor& w2,
                                 const at::Tensor& w2_scales,
                                 const std::optional<at::Tensor>& w2_bias, int64_t bits,
                                 int64_t intermediate_size, std::string_view activation);

at::Tensor quantized_moe_masked_tensors(const at::Tensor& x, const at::Tensor& weights,
                                        const at::Tensor& counts, const at::Tensor& w13,
                                        const at::Tensor& w13_scales,
                                        const std::optional<at::Tensor>& w13_bias,
                                        const at::Tensor& w2, const at::Tensor& w2_scales,
                                        const std::optional<at::Tensor>& w2_bias, int64_t bits,
                                        int64_t intermediate_size, std::string_view activation);

}  // namespace rbln
