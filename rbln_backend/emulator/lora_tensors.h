// The adapter op over tensors; emulator/ops.py says what it computes.
#pragma once

#include <ATen/core/Tensor.h>

namespace rbln {

void add_lora_tensors(const at::Tensor& y, const at::Tensor& x, const at::Tensor& slots,
                      const at::Tensor& a, at::TensorList b, int64_t rank,
                      at::IntArrayRef out_features);

}  // namespace rbln
