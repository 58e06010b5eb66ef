// Checks what a caller of the op over quantised weights can get wrong; see library.cpp.
#include "quantized_tensors.h"

#include <vector>

#include "tensors.h"

namespace rbln {

using at::Tensor;

QuantizedWeight quantized_weight(const Tensor& words, const Tensor& scales, int64_t columns,
                                 int64_t depth, int64_t bits) {
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

Tensor quantized_linear_tensors(const Tensor& x, const Tensor& words, const Tensor& scales,
                                const std::optional<Tensor>& bias, int64_t out_features,
                                int64_t bits) {
  const Rows rows(x);
  if (bias.has_value()) {
    check_dtype(*bias, "bias", x);
    TORCH_CHECK(bias->numel() == out_features && bias->is_contiguous(), "bias has ",
                bias->numel(), " elements instead of ", out_features);
  }
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = out_features;
  const Tensor out = empty_like_dtype(sizes, x);
  const QuantizedLinearArgs args{
      {dtype_of(x, "x"), rows.data(), rows.count, rows.width, rows.stride, nullptr,
       bias.has_value() ? bias->const_data_ptr() : nullptr, out_features, out.mutable_data_ptr()},
      quantized_weight(words, scales, out_features, rows.width, bits)};
  launch([args] { quantized_linear(args); });
  return out;
}

}  // namespace rbln
