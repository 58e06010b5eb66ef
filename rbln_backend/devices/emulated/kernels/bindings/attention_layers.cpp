// Whole attention layers over tensors: devices/emulated/ops.py says what the ops compute.
#include <torch/library.h>

#include "bindings/attention_call.h"

namespace rbln::bindings {
namespace {

// Heads in rows of tokens: [tokens, heads * head_size] from a column on.
struct HeadRows {
  Tensor tensor;  // keeps the memory
  const void* data;
  int64_t stride, heads, head_size;

  HeadRows(const Tensor& source, const char* name, int64_t column, int64_t tokens, int64_t heads_,
           int64_t head_size_)
      : tensor(source), stride(source.stride(0)), heads(heads_), head_size(head_size_) {
    // Neither a product nor a sum of these overflows: heads are at most the columns of q.
    TORCH_CHECK(source.dim() == 2 && source.size(0) == tokens && source.stride(1) == 1 &&
                    column >= 0 && column <= source.size(1) &&
                    heads * head_size <= source.size(1) - column,
                name, " has shape ", source.sizes(), "; expected ", tokens, " rows with ", heads,
                " heads of ", head_size, " from column ", column, " on");
    data = static_cast<const char*>(source.const_data_ptr()) + column * source.element_size();
  }

  // `fresh` [tokens, heads * head_size] takes the place of the rows.
  void replace(Tensor fresh) {
    tensor = std::move(fresh);
    data = tensor.const_data_ptr();
    stride = heads * head_size;
  }

  Heads by_request(int64_t length, int64_t group) const {
    return {data, {length * stride, group * head_size, head_size, stride}, tensor.scalar_type()};
  }
};

Tensor empty_rows(const HeadRows& rows) {
  return empty_like_dtype({rows.tensor.size(0), rows.heads * rows.head_size}, rows.tensor);
}

void normalise(HeadRows& rows, const std::optional<Tensor>& weight, const char* name, double eps) {
  if (!weight.has_value()) return;
  const bool is_f32 = weight->scalar_type() == at::kFloat;
  if (!is_f32) check_dtype(*weight, name, rows.tensor);
  TORCH_CHECK(weight->numel() == rows.head_size && weight->is_contiguous(), name, " has ",
              weight->numel(), " elements instead of ", rows.head_size);
  NormArgs args{};
  args.dtype = dtype_of(rows.tensor, "q");
  args.x = rows.data;
  args.rows = rows.tensor.size(0) * rows.heads;
  args.width = rows.head_size;
  args.heads = rows.heads;
  args.x_stride = rows.stride;
  args.weight = weight->const_data_ptr();
  args.weight_is_f32 = is_f32;
  args.epsilon = float(eps);
  Tensor fresh = empty_rows(rows);
  args.out = fresh.mutable_data_ptr();
  launch_rows(args, [](const NormArgs& useful) { rms_norm(useful); }, rows.heads);
  rows.replace(std::move(fresh));
}

void rotate(HeadRows& q, HeadRows& k, const Tensor& positions, const Tensor& cos_sin_cache,
            bool is_neox) {
  check_dtype(cos_sin_cache, "cos_sin_cache", q.tensor);
  Tensor new_q = empty_rows(q), new_k = empty_rows(k);
  const RotaryArgs args{dtype_of(q.tensor, "q"), nullptr, cos_sin_cache.const_data_ptr(),
                        cos_sin_cache.stride(0), cos_sin_cache.size(1), q.head_size, is_neox,
                        q.tensor.size(0),
                        {{q.data, q.heads, q.stride, new_q.mutable_data_ptr()},
                         {k.data, k.heads, k.stride, new_k.mutable_data_ptr()}}};
  launch_rotary(args, positions, cos_sin_cache);
  q.replace(std::move(new_q));
  k.replace(std::move(new_k));
}

Tensor self_attention(const Tensor& q, int64_t q_column, const Tensor& k, int64_t k_column,
                      const Tensor& v, int64_t v_column, const std::optional<Tensor>& q_norm,
                      const std::optional<Tensor>& k_norm, double eps,
                      const std::optional<Tensor>& positions,
                      const std::optional<Tensor>& cos_sin_cache, bool is_neox,
                      const Tensor& kv_cache, const Tensor& scale, const Tensor& starts,
                      const std::optional<Tensor>& ends, const Tensor& block_tables,
                      const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                      const std::optional<Tensor>& slopes, const std::optional<Tensor>& k_scale,
                      const std::optional<Tensor>& v_scale, std::optional<int64_t> chunk,
                      std::optional<int64_t> window, int64_t group, int64_t batch,
                      const std::optional<Tensor>& counts) {
  TORCH_CHECK(kv_cache.dim() == 6 && kv_cache.size(1) == 2 && kv_cache.size(3) == 1 &&
                  kv_cache.stride(5) == 1,
              "kv_cache has shape ", kv_cache.sizes(), " instead of [N,2,Hkv,1,S,D]");
  for (const Tensor* tensor : {&k, &v}) check_dtype(*tensor, "k or v", q);
  TORCH_CHECK(batch > 0 && group > 0 && q.dim() == 2 && group <= q.size(1) &&
                  q.size(0) % batch == 0, "q has shape ",
              q.sizes(), " for a batch of ", batch, " and groups of ", group);
  check_tables(block_tables, batch);
  const int64_t tokens = q.size(0), kv_heads = kv_cache.size(2), head_size = kv_cache.size(5);
  HeadRows queries(q, "q", q_column, tokens, kv_heads * group, head_size);
  HeadRows keys(k, "k", k_column, tokens, kv_heads, head_size);
  const HeadRows values(v, "v", v_column, tokens, kv_heads, head_size);
  normalise(queries, q_norm, "q_norm", eps);
  normalise(keys, k_norm, "k_norm", eps);
  if (positions.has_value()) {
    TORCH_CHECK(cos_sin_cache.has_value(), "positions come without a cos_sin_cache");
    rotate(queries, keys, *positions, *cos_sin_cache, is_neox);
  }
  const Sizes sizes{batch, kv_heads, group, tokens / batch, head_size, head_size};
  AttentionCall call(sizes, queries.by_request(sizes.length, group),
                     keys.by_request(sizes.length, 1), values.by_request(sizes.length, 1),
                     kv_cache, scale, {sinks, soft_cap, slopes, k_scale, v_scale, chunk, window, counts});
  if (ends.has_value()) {
    call.run_window(starts, *ends, block_tables, kv_cache);
  } else {
    call.run_causal(starts, block_tables, kv_cache);
  }
  return call.out;
}

// A cache row is kv_c and k_pe: the key of all heads, and in its first part their value.
Tensor latent_attention(const Tensor& q, const Tensor& kv_c, const Tensor& k_pe,
                        const Tensor& kv_cache, const Tensor& scale, const Tensor& seq_idx,
                        const Tensor& block_tables, int64_t batch,
                        const std::optional<Tensor>& counts) {
  TORCH_CHECK(kv_cache.dim() == 6 && kv_cache.size(1) == 1 && kv_cache.size(2) == 1 &&
                  kv_cache.size(3) == 1 && kv_cache.stride(5) == 1,
              "kv_cache has shape ", kv_cache.sizes(), " instead of [N,1,1,1,S,C+R]");
  for (const Tensor* tensor : {&q, &kv_c, &k_pe}) check_dtype(*tensor, "q, kv_c or k_pe", kv_cache);
  const int64_t tokens = q.size(0), latent = kv_c.size(-1), turned = k_pe.size(-1);
  TORCH_CHECK(q.dim() == 3 && kv_c.dim() == 2 && k_pe.dim() == 2 && batch > 0 &&
                  tokens % batch == 0 && kv_c.size(0) == tokens && k_pe.size(0) == tokens &&
                  q.size(2) == latent + turned && kv_cache.size(5) == q.size(2) &&
                  q.stride(2) == 1 && kv_c.stride(1) == 1 && k_pe.stride(1) == 1,
              "q ", q.sizes(), ", kv_c ", kv_c.sizes(), ", k_pe ", k_pe.sizes(), " and kv_cache ",
              kv_cache.sizes(), " disagree for a batch of ", batch);
  check_tables(block_tables, batch);
  const int64_t heads = q.size(1), length = tokens / batch;
  const auto rows = [length](const Tensor& t, int64_t head) {
    return Heads{t.const_data_ptr(), {length * t.stride(0), 0, head, t.stride(0)},
                 t.scalar_type()};
  };
  const Sizes sizes{batch, 1, heads, length, q.size(2), latent};
  Options options;
  options.counts = counts;
  AttentionCall call(sizes, rows(q, q.stride(1)), rows(kv_c, 0), rows(k_pe, 0), kv_cache, scale,
                     options);
  call.args.cache_stride.kv = 0;
  call.args.k_size = call.args.v_place = latent;
  call.args.v_size = turned;
  call.run_causal(seq_idx, block_tables, kv_cache);
  return call.out.view({tokens, heads, latent});
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("self_attention", TORCH_FN(self_attention));
  m.impl("latent_attention", TORCH_FN(latent_attention));
}

}  // namespace rbln::bindings
