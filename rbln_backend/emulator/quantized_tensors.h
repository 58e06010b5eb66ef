// The op over quantised weights on tensors; see library.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace rbln {

at::Tensor quantized_linear_tensors(const at::Tensor& x, const at::Tensor& words,
                                    const at::Tensor& scales, const std::optional<at::Tensor>& bias,
                                    int64_t out_features, int64_t bits);

}  // namespace rbln
