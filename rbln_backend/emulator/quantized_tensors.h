// The op over quantised weights on tensors; see library.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "quantized.h"

namespace rbln {

// The weight of [columns, depth] behind packed words and scales; throws c10::Error for others.
QuantizedWeight quantized_weight(const at::Tensor& words, const at::Tensor& scales,
                                 int64_t columns, int64_t depth, int64_t bits);

at::Tensor quantized_linear_tensors(const at::Tensor& x, const at::Tensor& words,
                                    const at::Tensor& scales, const std::optional<at::Tensor>& bias,
                                    int64_t out_features, int64_t bits);

}  // namespace rbln
