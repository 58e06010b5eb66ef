// Packed weights: checks of their shapes, and positions of their elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "bindings/tensors.h"
#include "quantized/quantized.h"

namespace rbln {

// Elements of one of the `count` packed [columns, depth] matrices in `stack`.
inline int64_t check_packed(const at::Tensor& stack, const char* name, int64_t count,
                            int64_t columns, int64_t depth, const at::Tensor& x) {
  check_dtype(stack, name, x);
  const bool pairs = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(stack.dim() == (pairs ? 5 : 4) && stack.is_contiguous() && stack.size(0) == count &&
                  stack.size(1) == panels_of(columns) &&
                  stack.size(2) == (pairs ? (depth + 1) / 2 : depth),
              name, " has shape ", stack.sizes(), ", not that of ", count,
              " packed matrices of [", columns, ", ", depth, "] in ", x.scalar_type());
  return stack.numel() / count;
}

inline Format format_of(std::string_view name) {
  if (name == "int4") return Format::int4;
  if (name == "int8") return Format::int8;
  if (name == "e4m3") return Format::e4m3;
  if (name == "e2m1") return Format::e2m1;
  TORCH_CHECK(name == "blocks8", "format is '", name,
              "', known are int4, int8, e4m3, e2m1 and blocks8");
  return Format::blocks8;
}

// The weight of [columns, depth] behind packed words, scales and zero points.
inline QuantizedWeight quantized_weight(const at::Tensor& words, const at::Tensor& scales,
                                        const std::optional<at::Tensor>& zeros, int64_t columns,
                                        int64_t depth, std::string_view name) {
  const Format format = format_of(name);
  const int64_t fields = 32 / bits_of(format), panels = panels_of(columns);
  TORCH_CHECK(words.scalar_type() == at::kInt && words.dim() == 3 && words.is_contiguous() &&
                  words.size(0) == panels && words.size(1) * fields == depth &&
                  words.size(2) == kPanel,
              "words has shape ", words.sizes(), " in ", words.scalar_type(),
              ", not that of a packed ", name, " weight of [", columns, ", ", depth, "]");
  TORCH_CHECK(scales.dim() == 3 && scales.is_contiguous() && scales.size(0) == panels &&
                  scales.size(2) == kPanel && scales.size(1) > 0,
              "scales has shape ", scales.sizes(), " for ", panels, " panels of ", kPanel);
  const int64_t group = depth / scales.size(1), chunk = chunk_of(format);
  const bool may_end_early = scales.size(1) == 1 && format != Format::blocks8;
  TORCH_CHECK(group * scales.size(1) == depth && (may_end_early || group % chunk == 0),
              scales.size(1), " scales per column do not share ", depth,
              " depths in groups of whole ", chunk, "s");
  const bool are_powers = format == Format::e2m1;
  TORCH_CHECK(!are_powers || scales.scalar_type() == at::kByte, "scales of e2m1 have dtype ",
              scales.scalar_type(), " instead of uint8");
  const uint8_t* zero_points = nullptr;
  if (zeros.has_value()) {
    TORCH_CHECK((format == Format::int4 || format == Format::int8) &&
                    zeros->scalar_type() == at::kByte && zeros->is_contiguous() &&
                    zeros->sizes() == scales.sizes(),
                "zeros of ", name, " has shape ", zeros->sizes(), " in ", zeros->scalar_type());
    zero_points = zeros->const_data_ptr<uint8_t>();
  }
  return {format,
          group,
          reinterpret_cast<const uint32_t*>(words.const_data_ptr<int32_t>()),
          are_powers ? Dtype::f32 : dtype_of(scales, "scales"),
          scales.const_data_ptr(),
          zero_points};
}

}  // namespace rbln
