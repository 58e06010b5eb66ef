// Products with packed weights over tensors, and packing.
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <vector>

#include "bindings/exports.h"
#include "bindings/packed.h"
#include "bindings/tensors.h"

namespace rbln::bindings {
namespace {

using at::Tensor;

Tensor pack_linear_weight(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "weight has ", weight.dim(), " dimensions instead of 2");
  const Dtype dtype = dtype_of(weight, "weight");
  const Rows rows(weight);
  const int64_t panels = panels_of(rows.count);
  const Tensor packed =
      dtype == Dtype::bf16 ? empty_like_dtype({panels, (rows.width + 1) / 2, kPanel, 2}, weight)
                           : empty_like_dtype({panels, rows.width, kPanel}, weight);
  pack_weight(dtype, rows.data(), rows.count, rows.width, rows.stride, packed.mutable_data_ptr());
  return packed;
}

void pack_linear_weight_(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight is not a contiguous matrix");
  const Dtype dtype = dtype_of(weight, "weight");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  TORCH_CHECK(columns % kPanel == 0 && depth == padded_depth(dtype, depth),
              "a weight of [", columns, ", ", depth, "] needs padding");
  pack_weight_in_place(dtype, weight.mutable_data_ptr(), columns, depth);
}

// The elements of `bias` [out_features], or null.
const void* checked_bias(const std::optional<Tensor>& bias, int64_t out_features, const Tensor& x) {
  if (!bias.has_value()) return nullptr;
  check_dtype(*bias, "bias", x);
  TORCH_CHECK(bias->numel() == out_features && bias->is_contiguous(), "bias has ", bias->numel(),
              " elements instead of ", out_features);
  return bias->const_data_ptr();
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
              int64_t out_features) {
  const bool pairs = x.scalar_type() == at::kBFloat16;
  const bool is_coded = pairs && packed.scalar_type() == at::kByte;
  if (!is_coded) check_dtype(packed, "packed", x);
  const Rows rows(x);
  TORCH_CHECK(packed.dim() == (pairs ? 4 : 3) && packed.is_contiguous(),
              "packed is not a weight packed for ", x.scalar_type());
  const int64_t depth = pairs ? (rows.width + 1) / 2 : rows.width;
  TORCH_CHECK(rows.width > 0 && packed.size(1) == depth, "x has ", rows.width,
              " features, the packed weight was made for ", packed.size(1) * (pairs ? 2 : 1));
  TORCH_CHECK(
      out_features > (packed.size(0) - 1) * kPanel && out_features <= packed.size(0) * kPanel,
      "out_features ", out_features, " does not fit ", packed.size(0), " panels of ", kPanel);
  TORCH_CHECK(!is_coded || (packed.numel() == packed.size(0) * 4 * depth * kPanel &&
                            is_coded_weight(packed.const_data_ptr(), out_features, 2 * depth)),
              "packed is not a coded weight");
  const void* const offsets = checked_bias(bias, out_features, x);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = out_features;
  const Tensor out = empty_like_dtype(sizes, x);
  const LinearArgs args{dtype_of(x, "x"), rows.data(), rows.count, rows.width,
                        rows.stride, packed.const_data_ptr(), offsets, out_features,
                        out.mutable_data_ptr(), 0, is_coded};
  launch_rows(args, [](const LinearArgs& useful) { rbln::linear(useful); });
  return out;
}

Tensor linear_heads(const Tensor& x, const Tensor& packed, int64_t out_features) {
  check_dtype(packed, "packed", x);
  const bool pairs = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, "x has shape ", x.sizes(),
              " instead of [T, heads, K], the last of them contiguous");
  TORCH_CHECK(packed.dim() == (pairs ? 5 : 4) && packed.is_contiguous() &&
                  packed.size(0) == x.size(1),
              "packed is not a weight for each head, packed for ", x.scalar_type());
  const int64_t depth = pairs ? (x.size(2) + 1) / 2 : x.size(2), panels = packed.size(1);
  TORCH_CHECK(packed.size(2) == depth && out_features > (panels - 1) * kPanel &&
                  out_features <= panels * kPanel,
              "packed has shape ", packed.sizes(), " for ", x.size(2), " features and ",
              out_features, " results");
  const Tensor out = empty_like_dtype({x.size(0), x.size(1), out_features}, x);
  const LinearArgs first{dtype_of(x, "x"), x.const_data_ptr(), x.size(0), x.size(2), x.stride(0),
                         packed.const_data_ptr(), nullptr, out_features, out.mutable_data_ptr(),
                         x.size(1) * out_features};
  launch_rows(first, [heads = x.size(1), each = x.stride(1),
                      elements = packed.stride(0)](const LinearArgs& useful) {
    rbln::linear_heads(useful, heads, each, elements);
  });
  return out;
}

Tensor quantized_linear(const Tensor& x, const Tensor& words, const Tensor& scales,
                        const std::optional<Tensor>& zeros, const std::optional<Tensor>& bias,
                        int64_t out_features, std::string_view format) {
  const Rows rows(x);
  const void* const offsets = checked_bias(bias, out_features, x);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = out_features;
  const Tensor out = empty_like_dtype(sizes, x);
  const QuantizedLinearArgs args{
      {dtype_of(x, "x"), rows.data(), rows.count, rows.width, rows.stride, nullptr, offsets,
       out_features, out.mutable_data_ptr()},
      quantized_weight(words, scales, zeros, out_features, rows.width, format)};
  launch([own = args, rows = rows.count]() mutable {
    own.plain.rows = useful_rows(rows);
    if (own.plain.rows > 0) rbln::quantized_linear(own);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("pack_linear_weight", TORCH_FN(pack_linear_weight));
  m.impl("pack_linear_weight_", TORCH_FN(pack_linear_weight_));
  m.impl("linear", TORCH_FN(linear));
  m.impl("linear_heads", TORCH_FN(linear_heads));
  m.impl("quantized_linear", TORCH_FN(quantized_linear));
}

}  // namespace rbln::bindings

RBLN_EXPORT int rbln_emulator_code_weight(void* packed, int64_t columns, int64_t depth) {
  return rbln::code_weight(packed, columns, depth);
}
