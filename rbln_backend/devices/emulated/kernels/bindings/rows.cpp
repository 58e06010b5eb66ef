// Norms, activations, rotary embedding, numbered rows and greedy sampling over tensors.
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/tensors.h"
#include "rows/rows.h"

namespace rbln::bindings {
namespace {

using at::Tensor;

void run_norm(const Tensor& x, const Tensor* residual, const Tensor& weight, double epsilon,
              const Tensor& out, const Tensor* residual_out) {
  const Rows rows(x);
  const Rows other(residual == nullptr ? x : *residual);
  const bool is_f32 = weight.scalar_type() == at::kFloat;
  if (!is_f32) check_dtype(weight, "weight", x);
  TORCH_CHECK(weight.numel() == rows.width && weight.is_contiguous(), "weight has ",
              weight.numel(), " elements instead of ", rows.width);
  const NormArgs args{
      dtype_of(x, "x"), rows.data(), residual == nullptr ? nullptr : other.data(),
      rows.count, rows.width, 1, rows.stride, other.stride, weight.const_data_ptr(),
      is_f32, float(epsilon), out.mutable_data_ptr(),
      residual_out == nullptr ? nullptr : residual_out->mutable_data_ptr()};
  // Of [tokens, heads, width], a token's heads are rows.
  const int64_t each = x.dim() == 3 ? std::max<int64_t>(x.size(1), 1) : 1;
  launch_rows(args, [](const NormArgs& useful) { rbln::rms_norm(useful); }, each);
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

Activation activation_of(std::string_view name) {
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
  const ActivationArgs args{dtype_of(x, "x"), activation_of(function), gated, rows.data(),
                                  rows.count, width, rows.stride, out.mutable_data_ptr()};
  launch_rows(args, [](const ActivationArgs& useful) { rbln::activate(useful); });
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
  const LayerNormArgs args{dtype_of(x, "x"), rows.data(), rows.count, rows.width,
                                 rows.stride,
                                 weight.has_value() ? weight->const_data_ptr() : nullptr,
                                 bias.has_value() ? bias->const_data_ptr() : nullptr,
                                 float(epsilon), out.mutable_data_ptr()};
  launch_rows(args, [](const LayerNormArgs& useful) { rbln::layer_norm(useful); });
  return out;
}

std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& q,
                                            const Tensor& k, const Tensor& cos_sin_cache,
                                            int64_t head_size, bool is_neox) {
  check_dtype(k, "k", q);
  check_dtype(cos_sin_cache, "cos_sin_cache", q);
  const Rows queries(q), keys(k);
  TORCH_CHECK(queries.count == keys.count, "q has ", queries.count, " rows and k ", keys.count);
  TORCH_CHECK(head_size > 0, "head_size is ", head_size);
  TORCH_CHECK(queries.width % head_size == 0 && keys.width % head_size == 0,
              "the widths of q and k, ", queries.width, " and ", keys.width,
              ", are not multiples of head_size ", head_size);
  const Tensor q_out = empty_like_dtype(q.sizes(), q), k_out = empty_like_dtype(k.sizes(), k);
  const RotaryArgs args{
      dtype_of(q, "q"), nullptr, cos_sin_cache.const_data_ptr(), cos_sin_cache.stride(0),
      cos_sin_cache.size(1), head_size, is_neox, queries.count,
      {{queries.data(), queries.width / head_size, queries.stride, q_out.mutable_data_ptr()},
       {keys.data(), keys.width / head_size, keys.stride, k_out.mutable_data_ptr()}}};
  launch_rotary(args, positions, cos_sin_cache);
  return {q_out, k_out};
}

Tensor take_rows(const Tensor& x, const Tensor& numbers) {
  TORCH_CHECK(x.dim() == 2 && numbers.scalar_type() == at::kLong && numbers.is_contiguous(),
              "x has shape ", x.sizes(), " and numbers are ", numbers.scalar_type(),
              "; they are [rows, width] and int64");
  const Rows source(x);
  std::vector<int64_t> sizes = numbers.sizes().vec();
  sizes.push_back(source.width);
  const Tensor out = empty_like_dtype(sizes, x);
  const auto size = int64_t(x.element_size());
  struct {
    const char* x;
    int64_t count, bytes, stride, rows;
    const int64_t* numbers;
    char* out;
  } args{static_cast<const char*>(source.data()), source.count, source.width * size,
         source.stride * size, numbers.numel(), numbers.const_data_ptr<int64_t>(),
         static_cast<char*>(out.mutable_data_ptr())};
  launch_rows(args, [](const auto& useful) {
    for (int64_t r = 0; r < useful.rows; ++r) {
      const int64_t number = useful.numbers[r];
      TORCH_CHECK_INDEX(number >= 0 && number < useful.count, "row ", number, " of ", useful.count);
      std::memcpy(useful.out + r * useful.bytes, useful.x + number * useful.stride, useful.bytes);
    }
  });
  return out;
}

Tensor greedy(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits has shape ", logits.sizes(),
              " instead of [rows, vocabulary]");
  const Rows rows(logits);
  const Tensor out = at::detail::empty_cpu({rows.count, 1}, at::kInt);
  const GreedyArgs args{dtype_of(logits, "logits"), rows.data(), rows.count, rows.width,
                        rows.stride, out.mutable_data_ptr<int32_t>()};
  launch([args] { rbln::greedy(args); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("rms_norm", TORCH_FN(rms_norm));
  m.impl("fused_add_rms_norm", TORCH_FN(fused_add_rms_norm));
  m.impl("layer_norm", TORCH_FN(layer_norm));
  m.impl("activate", TORCH_FN(activate));
  m.impl("rotary_embedding", TORCH_FN(rotary_embedding));
  m.impl("take_rows", TORCH_FN(take_rows));
  m.impl("greedy", TORCH_FN(greedy));
}

}  // namespace rbln::bindings
