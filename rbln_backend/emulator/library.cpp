// The torch ops: checks what a caller can get wrong, turns tensors into kernel arguments.
//
// The schemas live in Python (emulator/ops.py and attention/ops.py); this file adds the CPU bodies.
// Only it includes torch/library.h, which takes the compiler longer than all kernels.
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "attention_tensors.h"
#include "channel_tensors.h"
#include "kernels.h"
#include "lora_tensors.h"
#include "moe_tensors.h"
#include "quantized_tensors.h"
#include "simd.h"
#include "tensors.h"

namespace {

using at::Tensor;

using rbln::check_dtype;
using rbln::dtype_of;
using rbln::empty_like_dtype;
using rbln::launch;
using rbln::Rows;

Tensor pack_linear_weight(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "weight has ", weight.dim(), " dimensions instead of 2");
  const rbln::Dtype dtype = dtype_of(weight, "weight");
  const Rows rows(weight);
  const int64_t panels = (rows.count + rbln::kPanel - 1) / rbln::kPanel;
  const Tensor packed =
      dtype == rbln::Dtype::bf16
          ? empty_like_dtype({panels, (rows.width + 1) / 2, rbln::kPanel, 2}, weight)
          : empty_like_dtype({panels, rows.width, rbln::kPanel}, weight);
  rbln::pack_weight(dtype, rows.data(), rows.count, rows.width, rows.stride,
                    packed.mutable_data_ptr());
  return packed;
}

void pack_linear_weight_in_place(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight is not a contiguous matrix");
  const rbln::Dtype dtype = dtype_of(weight, "weight");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  TORCH_CHECK(columns % rbln::kPanel == 0 && depth == rbln::padded_depth(dtype, depth),
              "a weight of [", columns, ", ", depth, "] needs padding");
  rbln::pack_weight_in_place(dtype, weight.mutable_data_ptr(), columns, depth);
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
              int64_t out_features) {
  check_dtype(packed, "packed", x);
  const Rows rows(x);
  const bool pairs = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(packed.dim() == (pairs ? 4 : 3) && packed.is_contiguous(),
              "packed is not a weight packed for ", x.scalar_type());
  const int64_t depth = pairs ? (rows.width + 1) / 2 : rows.width;
  TORCH_CHECK(rows.width > 0 && packed.size(1) == depth, "x has ", rows.width,
              " features, the packed weight was made for ", packed.size(1) * (pairs ? 2 : 1));
  TORCH_CHECK(out_features > (packed.size(0) - 1) * rbln::kPanel &&
                  out_features <= packed.size(0) * rbln::kPanel,
              "out_features ", out_features, " does not fit ", packed.size(0), " panels of ",
              rbln::kPanel);
  if (bias.has_value()) {
    check_dtype(*bias, "bias", x);
    TORCH_CHECK(bias->numel() == out_features && bias->is_contiguous(), "bias has ",
                bias->numel(), " elements instead of ", out_features);
  }
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = out_features;
  const Tensor out = empty_like_dtype(sizes, x);
  const rbln::LinearArgs args{
      dtype_of(x, "x"), rows.data(), rows.count, rows.width, rows.stride,
      packed.const_data_ptr(), bias.has_value() ? bias->const_data_ptr() : nullptr,
      out_features, out.mutable_data_ptr()};
  launch([args] { rbln::linear(args); });
  return out;
}

void run_norm(const Tensor& x, const Tensor* residual, const Tensor& weight, double epsilon,
              const Tensor& out, const Tensor* residual_out) {
  const Rows rows(x);
  const Rows other(residual == nullptr ? x : *residual);
  const bool is_f32 = weight.scalar_type() == at::kFloat;
  if (!is_f32) check_dtype(weight, "weight", x);
  TORCH_CHECK(weight.numel() == rows.width && weight.is_contiguous(), "weight has ",
              weight.numel(), " elements instead of ", rows.width);
  const rbln::NormArgs args{
      dtype_of(x, "x"), rows.data(), residual == nullptr ? nullptr : other.data(),
      rows.count, rows.width, 1, rows.stride, other.stride, weight.const_data_ptr(),
      is_f32, float(epsilon), out.mutable_data_ptr(),
      residual_out == nullptr ? nullptr : residual_out->mutable_data_ptr()};
  launch([args] { rbln::rms_norm(args); });
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  const Tensor out = empty_like_dtype(x.sizes(), x);
  run_norm(x, nullptr, weight, epsilon, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual,
                                              const Tensor& weight, double epsilon) {
  check_dtype(residual, "residual", x);
  TORCH_CHECK(residual.sizes() == x.sizes(), "residual has shape ", residual.sizes(),
              " instead of ", x.sizes());
  const Tensor out = empty_like_dtype(x.sizes(), x);
  const Tensor residual_out = empty_like_dtype(x.sizes(), x);
  run_norm(x, &residual, weight, epsilon, out, &residual_out);
  return {out, residual_out};
}

rbln::Activation activation_of(std::string_view name) {
  using rbln::Activation;
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "quick_gelu") return Activation::quick_gelu;
  if (name == "relu2") return Activation::relu2;
  if (name == "sigmoid") return Activation::sigmoid;
  TORCH_CHECK(name == "softplus", "function '", name,
              "' is none of silu, gelu, gelu_tanh, quick_gelu, relu2, sigmoid, softplus");
  return Activation::softplus;
}

Tensor activate(const Tensor& x, std::string_view function, bool gated) {
  const Rows rows(x);
  TORCH_CHECK(!gated || rows.width % 2 == 0, "x has an odd last dimension ", rows.width);
  const int64_t width = gated ? rows.width / 2 : rows.width;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = width;
  const Tensor out = empty_like_dtype(sizes, x);
  const rbln::ActivationArgs args{dtype_of(x, "x"), activation_of(function), gated, rows.data(),
                                  rows.count, width, rows.stride, out.mutable_data_ptr()};
  launch([args] { rbln::activate(args); });
  return out;
}

Tensor layer_norm(const Tensor& x, const std::optional<Tensor>& weight,
                  const std::optional<Tensor>& bias, double epsilon) {
  const Rows rows(x);
  for (const auto* vector : {&weight, &bias}) {
    if (!vector->has_value()) continue;
    const char* name = vector == &weight ? "weight" : "bias";
    check_dtype(**vector, name, x);
    TORCH_CHECK((*vector)->numel() == rows.width && (*vector)->is_contiguous(), name, " has ",
                (*vector)->numel(), " elements instead of ", rows.width);
  }
  const Tensor out = empty_like_dtype(x.sizes(), x);
  const rbln::LayerNormArgs args{dtype_of(x, "x"), rows.data(), rows.count, rows.width,
                                 rows.stride,
                                 weight.has_value() ? weight->const_data_ptr() : nullptr,
                                 bias.has_value() ? bias->const_data_ptr() : nullptr,
                                 float(epsilon), out.mutable_data_ptr()};
  launch([args] { rbln::layer_norm(args); });
  return out;
}

std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& q,
                                            const Tensor& k, const Tensor& cos_sin_cache,
                                            int64_t head_size, bool is_neox) {
  check_dtype(k, "k", q);
  check_dtype(cos_sin_cache, "cos_sin_cache", q);
  const Rows queries(q), keys(k);
  TORCH_CHECK(queries.count == keys.count, "q has ", queries.count, " rows and k ", keys.count);
  TORCH_CHECK(queries.width % head_size == 0 && keys.width % head_size == 0,
              "the widths of q and k, ", queries.width, " and ", keys.width,
              ", are not multiples of head_size ", head_size);
  const Tensor q_out = empty_like_dtype(q.sizes(), q), k_out = empty_like_dtype(k.sizes(), k);
  const rbln::RotaryArgs args{
      dtype_of(q, "q"), nullptr, cos_sin_cache.const_data_ptr(), cos_sin_cache.stride(0),
      cos_sin_cache.size(1), head_size, is_neox, queries.count,
      {{queries.data(), queries.width / head_size, queries.stride, q_out.mutable_data_ptr()},
       {keys.data(), keys.width / head_size, keys.stride, k_out.mutable_data_ptr()}}};
  rbln::launch_rotary(args, positions, cos_sin_cache);
  return {q_out, k_out};
}

Tensor greedy(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits has shape ", logits.sizes(),
              " instead of [rows, vocabulary]");
  const Rows rows(logits);
  const Tensor out = at::detail::empty_cpu({rows.count, 1}, at::kInt);
  rbln::greedy({dtype_of(logits, "logits"), rows.data(), rows.count, rows.width, rows.stride,
                out.mutable_data_ptr<int32_t>()});
  return out;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* rbln_emulator_isa() {
  return rbln::isa_name();
}

extern "C" __attribute__((visibility("default"))) void rbln_emulator_set_threads(int threads) {
  rbln::set_team_threads(threads);
}

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("pack_linear_weight", TORCH_FN(pack_linear_weight));
  m.impl("pack_linear_weight_", TORCH_FN(pack_linear_weight_in_place));
  m.impl("linear", TORCH_FN(linear));
  m.impl("quantized_linear", TORCH_FN(rbln::quantized_linear_tensors));
  m.impl("rms_norm", TORCH_FN(rms_norm));
  m.impl("fused_add_rms_norm", TORCH_FN(fused_add_rms_norm));
  m.impl("layer_norm", TORCH_FN(layer_norm));
  m.impl("activate", TORCH_FN(activate));
  m.impl("rotary_embedding", TORCH_FN(rotary_embedding));
  m.impl("greedy", TORCH_FN(greedy));
  m.impl("self_attention", TORCH_FN(rbln::self_attention));
  m.impl("moe_route", TORCH_FN(rbln::moe_route_tensors));
  m.impl("moe", TORCH_FN(rbln::moe_tensors));
  m.impl("moe_masked", TORCH_FN(rbln::moe_masked_tensors));
  m.impl("quantized_moe", TORCH_FN(rbln::quantized_moe_tensors));
  m.impl("quantized_moe_masked", TORCH_FN(rbln::quantized_moe_masked_tensors));
  m.impl("add_lora_", TORCH_FN(rbln::add_lora_tensors));
}

TORCH_LIBRARY_IMPL(rbln_channels, CPU, m) {
  m.impl("all_reduce", TORCH_FN(rbln::all_reduce_tensor));
  m.impl("all_gather", TORCH_FN(rbln::all_gather_tensor));
  m.impl("reduce_scatter", TORCH_FN(rbln::reduce_scatter_tensor));
}

TORCH_LIBRARY_IMPL(rbln_custom_ops, CPU, m) {
  m.impl("flash_causal_attention_naive_prefill", TORCH_FN(rbln::flash_causal));
  m.impl("flash_causal_attention_naive_decode", TORCH_FN(rbln::flash_causal));
  m.impl("causal_attention_naive_prefill", TORCH_FN(rbln::one_block_causal));
  m.impl("causal_attention_naive_decode", TORCH_FN(rbln::one_block_causal));
  m.impl("sliding_window_attention_naive_prefill", TORCH_FN(rbln::window_prefill));
  m.impl("sliding_window_attention_naive_decode", TORCH_FN(rbln::window_decode));
}
