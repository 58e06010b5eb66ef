// Sampling over tensors.
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "bindings/tensors.h"
#include "sampling/sampling.h"

namespace rbln::bindings {
namespace {

using at::Tensor;

template <class T>
const T* one_by_row(const std::optional<Tensor>& values, const char* name, int64_t rows) {
  if (!values.has_value()) return nullptr;
  TORCH_CHECK(values->scalar_type() == c10::CppTypeToScalarType<T>::value &&
                  values->is_contiguous() && values->numel() == rows,
              name, " is ", values->scalar_type(), " ", values->sizes(), " for ", rows, " rows");
  return values->const_data_ptr<T>();
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const std::optional<Tensor>& top_k,
              const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
              const Tensor& randoms) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits has shape ", logits.sizes(),
              " instead of [rows, vocabulary]");
  const Rows rows(logits);
  const Tensor out = at::detail::empty_cpu({rows.count, 1}, at::kInt);
  rbln::sample({dtype_of(logits, "logits"), rows.data(), rows.count, rows.width, rows.stride,
                one_by_row<float>(temperature, "temperature", rows.count),
                one_by_row<int32_t>(top_k, "top_k", rows.count),
                one_by_row<float>(top_p, "top_p", rows.count),
                one_by_row<float>(min_p, "min_p", rows.count),
                one_by_row<int64_t>(randoms, "randoms", rows.count),
                out.mutable_data_ptr<int32_t>()});
  return out;
}

void penalize_(const Tensor& logits, const Tensor& prompts, const Tensor& outputs,
               const Tensor& output_ends, const Tensor& presence, const Tensor& frequency,
               const Tensor& repetition) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1,
              "logits is ", logits.scalar_type(), " ", logits.sizes(),
              " instead of float32 rows [rows, vocabulary]");
  const int64_t rows = logits.size(0);
  TORCH_CHECK(prompts.dim() == 2 && prompts.size(0) == rows && prompts.is_contiguous() &&
                  prompts.scalar_type() == at::kLong,
              "prompts is ", prompts.scalar_type(), " ", prompts.sizes(), " for ", rows, " rows");
  TORCH_CHECK(outputs.scalar_type() == at::kInt && outputs.is_contiguous(), "outputs is ",
              outputs.scalar_type(), " instead of int32");
  const int64_t* ends = one_by_row<int64_t>(output_ends, "output_ends", rows);
  for (int64_t r = 0; r < rows; ++r)
    TORCH_CHECK_INDEX(ends[r] >= (r == 0 ? 0 : ends[r - 1]) && ends[r] <= outputs.numel(),
                      "output_ends[", r, "] is ", ends[r], " of ", outputs.numel());
  if (rows == 0) return;
  rbln::penalize({logits.mutable_data_ptr<float>(), rows, logits.size(1), logits.stride(0),
                  prompts.const_data_ptr<int64_t>(), prompts.size(1),
                  outputs.const_data_ptr<int32_t>(), ends,
                  one_by_row<float>(presence, "presence", rows),
                  one_by_row<float>(frequency, "frequency", rows),
                  one_by_row<float>(repetition, "repetition", rows)});
}

std::tuple<Tensor, Tensor, Tensor> top_logprobs(const Tensor& logits, const Tensor& tokens,
                                                int64_t count, bool is_normalized) {
  TORCH_CHECK(logits.dim() == 2 && count >= 0 && count <= logits.size(1), "logits has shape ",
              logits.sizes(), " for ", count, " tokens of each row");
  const Rows rows(logits);
  const int32_t* own = one_by_row<int32_t>(tokens, "tokens", rows.count);
  for (int64_t r = 0; r < rows.count; ++r)
    TORCH_CHECK_INDEX(own[r] >= 0 && own[r] < rows.width, "tokens[", r, "] is ", own[r],
                      ", and there are ", rows.width);
  const Tensor ids = at::detail::empty_cpu({rows.count, 1 + count}, at::kInt);
  const Tensor values = at::detail::empty_cpu({rows.count, 1 + count}, at::kFloat);
  const Tensor ranks = at::detail::empty_cpu({rows.count}, at::kLong);
  rbln::top_logprobs({dtype_of(logits, "logits"), rows.data(), rows.count, rows.width, rows.stride,
                      own, count, is_normalized, ids.mutable_data_ptr<int32_t>(),
                      values.mutable_data_ptr<float>(), ranks.mutable_data_ptr<int64_t>()});
  return {ids, values, ranks};
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("sample", TORCH_FN(sample));
  m.impl("penalize_", TORCH_FN(penalize_));
  m.impl("top_logprobs", TORCH_FN(top_logprobs));
}

}  // namespace rbln::bindings
