// Mixtures of experts over tensors.
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "bindings/packed.h"
#include "bindings/tensors.h"
#include "moe/moe.h"

namespace rbln::bindings {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

// One matrix of every expert.
struct QuantizedStack {
  const char* name;
  const Tensor &words, &scales;
  const Maybe &zeros, &bias;
  std::string_view format;
};

// Adapter arguments of the ops.
struct AdapterTensors {
  const Maybe &slots, &a13, &b1, &b3, &a2, &b2;
  int64_t rank;
};

int64_t expert_count(const Tensor& w13) {
  TORCH_CHECK(w13.dim() > 0 && w13.size(0) > 0, "w13 has no experts");
  return w13.size(0);
}

void check_bias(const Maybe& bias, const char* name, int64_t experts, int64_t columns,
                const Tensor& x) {
  if (!bias.has_value()) return;
  check_dtype(*bias, name, x);
  TORCH_CHECK(bias->is_contiguous() && bias->dim() == 2 && bias->size(0) == experts &&
                  bias->size(1) == columns,
              "the bias of ", name, " has shape ", bias->sizes(), " instead of [", experts, ", ",
              columns, "]");
}

// The first of `experts` quantised [columns, depth] matrices.
QuantizedWeight check_quantized(const QuantizedStack& stack, int64_t experts, int64_t columns,
                                int64_t depth, const Tensor& x) {
  const Tensor &words = stack.words, &scales = stack.scales;
  TORCH_CHECK(words.dim() == 4 && scales.dim() == 4 && words.is_contiguous() &&
                  scales.is_contiguous() && words.size(0) == experts && scales.size(0) == experts,
              stack.name, " has words of shape ", words.sizes(), " and scales of ",
              scales.sizes(), " for ", experts, " experts");
  Maybe zeros;
  if (stack.zeros.has_value()) {
    TORCH_CHECK(stack.zeros->sizes() == scales.sizes() && stack.zeros->is_contiguous(), stack.name,
                " has zeros of shape ", stack.zeros->sizes(), " and scales of ", scales.sizes());
    zeros = stack.zeros->select(0, 0);
  }
  check_bias(stack.bias, stack.name, experts, columns, x);
  return quantized_weight(words.select(0, 0), scales.select(0, 0), zeros, columns, depth,
                          stack.format);
}

void check_vector(const Maybe& vector, const char* name, at::ScalarType dtype,
                  int64_t count) {
  if (!vector.has_value()) return;
  TORCH_CHECK(vector->scalar_type() == dtype && vector->is_contiguous() && vector->numel() == count,
              name, " is ", vector->scalar_type(), " ", vector->sizes(), " instead of ", dtype,
              " with ", count, " elements");
}

template <class V>
const V* data_or_null(const Maybe& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<V>() : nullptr;
}

const void* data_of(const Maybe& bias) {
  return bias.has_value() ? bias->const_data_ptr() : nullptr;
}

// Everything but matrices, the weights of rows and what belongs to them.
MoeArgs layer_arguments(const Rows& rows, const Tensor& x, int64_t intermediate_size,
                        std::string_view activation) {
  TORCH_CHECK(x.dim() == 2, "x has shape ", x.sizes(), " instead of [rows, hidden]");
  TORCH_CHECK(activation == "silu" || activation == "swigluoai", "activation is '", activation,
              "', known are silu and swigluoai");
  MoeArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = rows.data();
  args.rows = rows.count;
  args.hidden_size = rows.width;
  args.x_stride = rows.stride;
  args.intermediate_size = intermediate_size;
  args.interleaved = activation == "swigluoai";
  return args;
}

MoeArgs plain_arguments(const Rows& rows, const Tensor& x, const Tensor& w13,
                        const Maybe& w13_bias, const Tensor& w2,
                        const Maybe& w2_bias, int64_t intermediate_size,
                        std::string_view activation) {
  MoeArgs args = layer_arguments(rows, x, intermediate_size, activation);
  const int64_t count = args.experts = expert_count(w13);
  const int64_t inner = intermediate_size, outer = rows.width;
  args.w13_elements = check_packed(w13, "w13", count, 2 * inner, outer, x);
  args.w2_elements = check_packed(w2, "w2", count, outer, inner, x);
  check_bias(w13_bias, "w13", count, 2 * inner, x);
  check_bias(w2_bias, "w2", count, outer, x);
  args.w13 = w13.const_data_ptr();
  args.w13_bias = data_of(w13_bias);
  args.w2 = w2.const_data_ptr();
  args.w2_bias = data_of(w2_bias);
  return args;
}

MoeArgs quantized_arguments(const Rows& rows, const Tensor& x, const QuantizedStack& w13,
                            const QuantizedStack& w2, int64_t intermediate_size,
                            std::string_view activation) {
  MoeArgs args = layer_arguments(rows, x, intermediate_size, activation);
  const int64_t count = args.experts = expert_count(w13.words);
  const int64_t inner = intermediate_size, outer = rows.width;
  args.quantized_w13 = check_quantized(w13, count, 2 * inner, outer, x);
  args.quantized_w2 = check_quantized(w2, count, outer, inner, x);
  args.w13_bias = data_of(w13.bias);
  args.w2_bias = data_of(w2.bias);
  return args;
}

// The adapters of one projection of [columns, depth]: a and each of b [experts, slots, ...].
ExpertLora expert_lora(const Maybe& a, const Maybe& b, const Maybe& second_b, const MoeArgs& args,
                       int64_t columns, int64_t depth, const Tensor& x) {
  TORCH_CHECK(a.has_value() && b.has_value() && args.adapters.rank > 0,
              "slots without adapters or without a rank");
  const int64_t slices = second_b.has_value() ? 2 : 1, rank = args.adapters.rank;
  const auto check = [&](const Tensor& stacks, const char* name, int64_t width, int64_t inputs) {
    TORCH_CHECK(stacks.dim() > 2 && stacks.is_contiguous() && stacks.size(0) == args.experts &&
                    stacks.size(1) == args.adapters.slot_count,
                name, " has shape ", stacks.sizes(), " for ", args.experts, " experts and ",
                args.adapters.slot_count, " slots");
    return check_packed(stacks.flatten(0, 1), name, args.experts * args.adapters.slot_count, width,
                        inputs, x);
  };
  ExpertLora lora{};
  lora.a = a->const_data_ptr();
  lora.a_elements = check(*a, "a", slices * rank, depth);
  lora.b[0] = b->const_data_ptr();
  lora.b_elements = check(*b, "b", columns / slices, rank);
  if (second_b.has_value()) {
    check(*second_b, "b", columns / slices, rank);
    lora.b[1] = second_b->const_data_ptr();
  }
  return lora;
}

ExpertAdapters adapter_arguments(const AdapterTensors& given, MoeArgs args, const Tensor& x) {
  if (!given.slots.has_value()) return {};
  ExpertAdapters& adapters = args.adapters;
  adapters.slots = slots_over(*given.slots, args.rows);
  adapters.requests = given.slots->numel();
  adapters.rank = given.rank;
  TORCH_CHECK(given.a13.has_value() && given.a13->dim() > 1 &&
                  given.b3.has_value() != args.interleaved,
              "adapters have the wrong slices");
  adapters.slot_count = given.a13->size(1);
  const int64_t inner = args.intermediate_size, outer = args.hidden_size;
  adapters.first = expert_lora(given.a13, given.b1, given.b3, args, 2 * inner, outer, x);
  adapters.second = expert_lora(given.a2, given.b2, std::nullopt, args, outer, inner, x);
  return adapters;
}

void check_slots(const ExpertAdapters& adapters) {
  if (adapters.slots != nullptr)
    rbln::check_slots(adapters.slots, adapters.requests, adapters.slot_count);
}

bool is_table(const Tensor& tensor, at::ScalarType dtype, int64_t rows) {
  return tensor.scalar_type() == dtype && tensor.dim() == 2 && tensor.size(0) == rows &&
         tensor.is_contiguous();
}

Tensor run_chosen(MoeArgs args, const Tensor& x, const Tensor& weights, const Tensor& ids,
                  const AdapterTensors& adapters) {
  args.adapters = adapter_arguments(adapters, args, x);
  TORCH_CHECK(is_table(weights, at::kFloat, args.rows) && is_table(ids, at::kInt, args.rows) &&
                  weights.sizes() == ids.sizes(),
              "expected weights float32 and ids int32 of ", args.rows, " rows, got ",
              weights.scalar_type(), " ", weights.sizes(), " and ", ids.scalar_type(), " ",
              ids.sizes());
  args.weights = weights.const_data_ptr<float>();
  args.ids = ids.const_data_ptr<int32_t>();
  args.top_k = ids.size(1);
  const Tensor out = empty_like_dtype(x.sizes(), x);
  args.out = out.mutable_data_ptr();
  launch_rows(args, [is_decode = args.adapters.requests == args.rows](MoeArgs& useful) {
    if (is_decode) useful.adapters.requests = useful.rows;
    check_slots(useful.adapters);
    rbln::moe(useful);
  });
  return out;
}

Tensor run_masked(MoeArgs args, const Tensor& x, const Tensor& weights, const Tensor& counts,
                  const AdapterTensors& adapters) {
  args.adapters = adapter_arguments(adapters, args, x);
  TORCH_CHECK(is_table(weights, at::kFloat, args.rows) && weights.size(1) == args.experts,
              "expected weights float32 [", args.rows, ", ", args.experts, "], got ",
              weights.scalar_type(), " ", weights.sizes());
  check_vector(counts, "counts", at::kInt, args.experts);
  args.weights = weights.const_data_ptr<float>();
  const Tensor out = empty_like_dtype(x.sizes(), x);
  args.out = out.mutable_data_ptr();
  const int32_t* chosen = counts.const_data_ptr<int32_t>();
  launch_rows(args, [chosen, is_decode = args.adapters.requests == args.rows](MoeArgs& useful) {
    if (is_decode) useful.adapters.requests = useful.rows;
    check_slots(useful.adapters);
    rbln::moe_masked(useful, chosen);
  });
  return out;
}

std::tuple<Tensor, Tensor> moe_route(const Tensor& logits, int64_t top_k, bool renormalize,
                                     const Maybe& expert_map, const Maybe& tokens_mask) {
  TORCH_CHECK(logits.dim() == 2, "logits has shape ", logits.sizes(), " instead of [rows, experts]");
  const Rows rows(logits);
  TORCH_CHECK(top_k > 0 && top_k <= rows.width, "top_k ", top_k, " of ", rows.width, " experts");
  check_vector(expert_map, "expert_map", at::kInt, rows.width);
  check_vector(tokens_mask, "tokens_mask", at::kFloat, rows.count);
  const Tensor weights = empty_of({rows.count, top_k}, at::kFloat);
  const Tensor ids = empty_of({rows.count, top_k}, at::kInt);
  const RouteArgs args{dtype_of(logits, "logits"), rows.data(), rows.count, rows.width, rows.stride,
                       top_k, renormalize, data_or_null<int32_t>(expert_map),
                       data_or_null<float>(tokens_mask), weights.mutable_data_ptr<float>(),
                       ids.mutable_data_ptr<int32_t>()};
  launch_rows(args, [](const RouteArgs& useful) { rbln::moe_route(useful); });
  return {weights, ids};
}

Tensor moe(const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& w13,
           const Maybe& w13_bias, const Tensor& w2, const Maybe& w2_bias, int64_t intermediate_size,
           std::string_view activation, const Maybe& slots, const Maybe& a13, const Maybe& b1,
           const Maybe& b3, const Maybe& a2, const Maybe& b2, int64_t rank) {
  const Rows rows(x);
  return run_chosen(
      plain_arguments(rows, x, w13, w13_bias, w2, w2_bias, intermediate_size, activation), x,
      weights, ids, {slots, a13, b1, b3, a2, b2, rank});
}

Tensor moe_masked(const Tensor& x, const Tensor& weights, const Tensor& counts, const Tensor& w13,
                  const Maybe& w13_bias, const Tensor& w2, const Maybe& w2_bias,
                  int64_t intermediate_size, std::string_view activation, const Maybe& slots,
                  const Maybe& a13, const Maybe& b1, const Maybe& b3, const Maybe& a2,
                  const Maybe& b2, int64_t rank) {
  const Rows rows(x);
  return run_masked(
      plain_arguments(rows, x, w13, w13_bias, w2, w2_bias, intermediate_size, activation), x,
      weights, counts, {slots, a13, b1, b3, a2, b2, rank});
}

Tensor quantized_moe(
    const Tensor& x, const Tensor& weights, const Tensor& ids, const Tensor& w13,
    const Tensor& w13_scales, const Maybe& w13_zeros, const Maybe& w13_bias,
    std::string_view w13_format, const Tensor& w2, const Tensor& w2_scales, const Maybe& w2_zeros,
    const Maybe& w2_bias, std::string_view w2_format, int64_t intermediate_size,
    std::string_view activation, const Maybe& slots, const Maybe& a13, const Maybe& b1,
    const Maybe& b3, const Maybe& a2, const Maybe& b2, int64_t rank) {
  const Rows rows(x);
  const QuantizedStack first{"w13", w13, w13_scales, w13_zeros, w13_bias, w13_format};
  const QuantizedStack second{"w2", w2, w2_scales, w2_zeros, w2_bias, w2_format};
  return run_chosen(quantized_arguments(rows, x, first, second, intermediate_size, activation), x,
                    weights, ids, {slots, a13, b1, b3, a2, b2, rank});
}

Tensor quantized_moe_masked(
    const Tensor& x, const Tensor& weights, const Tensor& counts, const Tensor& w13,
    const Tensor& w13_scales, const Maybe& w13_zeros, const Maybe& w13_bias,
    std::string_view w13_format, const Tensor& w2, const Tensor& w2_scales, const Maybe& w2_zeros,
    const Maybe& w2_bias, std::string_view w2_format, int64_t intermediate_size,
    std::string_view activation, const Maybe& slots, const Maybe& a13, const Maybe& b1,
    const Maybe& b3, const Maybe& a2, const Maybe& b2, int64_t rank) {
  const Rows rows(x);
  const QuantizedStack first{"w13", w13, w13_scales, w13_zeros, w13_bias, w13_format};
  const QuantizedStack second{"w2", w2, w2_scales, w2_zeros, w2_bias, w2_format};
  return run_masked(quantized_arguments(rows, x, first, second, intermediate_size, activation), x,
                    weights, counts, {slots, a13, b1, b3, a2, b2, rank});
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("moe_route", TORCH_FN(moe_route));
  m.impl("moe", TORCH_FN(moe));
  m.impl("moe_masked", TORCH_FN(moe_masked));
  m.impl("quantized_moe", TORCH_FN(quantized_moe));
  m.impl("quantized_moe_masked", TORCH_FN(quantized_moe_masked));
}

}  // namespace rbln::bindings
