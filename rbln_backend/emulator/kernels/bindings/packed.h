// What packed weights come in as: checks of their shapes, and where their elements lie.
#pragma once

#include <ATen/core/Tensor.h>

#include "bindings/tensors.h"
#include "linear/quantized.h"

namespace rbln {

// Elements of one of the `count` packed [columns, depth] matrices in `stack`.
inline int64_t check_packed(const at::Tensor& stack, const char* name, int64_t count,
                            int64_t columns, int64_t depth, const at::Tensor& x) {
  check_dtype(stack, name, x);
  const bool pairs = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(stack.dim() == (pairs ? 5 : 4) && stack.is_contiguous() && stack.size(0) == count &&
                  stack.size(1) == (columns + kPanel - 1) / kPanel &&
                  stack.size(2) == (pairs ? (depth + 1) / 2 : depth),
              name, " has shape ", stack.sizes(), ", not that of ", count,
              " packed matrices of [", columns, ", ", depth, "] in ", x.scalar_type());
  return stack.numel() / count;
}

// The weight of [columns, depth] behind packed words and scales.
inline QuantizedWeight quantized_weight(const at::Tensor& words, const at::Tensor& scales,
                                        int64_t columns, int64_t depth, int64_t bits) {
  TORCH_CHECK(bits == 4 || bits == 8, "bits is ", bits, ", known are 4 and 8");
  const int64_t fields = 32 / bits, panels = (columns + kPanel - 1) / kPanel;
  TORCH_CHECK(words.scalar_type() == at::kInt && words.dim() == 3 && words.is_contiguous() &&
                  words.size(0) == panels && words.size(1) * fields == depth &&
                  words.size(2) == kPanel,
              "words has shape ", words.sizes(), " in ", words.scalar_type(),
              ", not that of a packed ", bits, "-bit weight of [", columns, ", ", depth, "]");
  TORCH_CHECK(scales.dim() == 3 && scales.is_contiguous() && scales.size(0) == panels &&
                  scales.size(2) == kPanel && scales.size(1) > 0,
              "scales has shape ", scales.sizes(), " for ", panels, " panels of ", kPanel);
  const int64_t group = depth / scales.size(1);
  TORCH_CHECK(group * scales.size(1) == depth && (scales.size(1) == 1 || group % kChunk == 0),
              scales.size(1), " scales per column do not share ", depth,
              " depths in groups of whole ", kChunk, "s");
  return {int(bits), group, reinterpret_cast<const uint32_t*>(words.const_data_ptr<int32_t>()),
          dtype_of(scales, "scales"), scales.const_data_ptr()};
}

}  // namespace rbln
