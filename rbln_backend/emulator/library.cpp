// The torch ops: checks what a caller can get wrong, turns tensors into kernel arguments.
//
// The schemas live in Python (emulator/ops.py and attention/ops.py); this file adds the CPU bodies.
// Only it includes torch/library.h, which takes the compiler longer than all kernels.
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "moe_tensors.h"
#include "simd.h"
#include "tensors.h"

namespace {

using at::Tensor;

using rbln::check_dtype;
using rbln::dtype_of;
using rbln::empty_like_dtype;
using rbln::Rows;

std::vector<int64_t> integers(const Tensor& tensor, const char* name) {
  std::vector<int64_t> values(size_t(tensor.numel()));
  const Tensor dense = tensor.contiguous();
  if (tensor.scalar_type() == at::kInt) {
    std::copy_n(dense.const_data_ptr<int32_t>(), values.size(), values.begin());
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kLong, name, " has dtype ", tensor.scalar_type(),
                " instead of int32 or int64");
    std::copy_n(dense.const_data_ptr<int64_t>(), values.size(), values.begin());
  }
  return values;
}

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
  rbln::linear({dtype_of(x, "x"), rows.data(), rows.count, rows.width, rows.stride,
                packed.const_data_ptr(), bias.has_value() ? bias->const_data_ptr() : nullptr,
                out_features, out.mutable_data_ptr()});
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
  rbln::rms_norm({dtype_of(x, "x"), rows.data(), residual == nullptr ? nullptr : other.data(),
                  rows.count, rows.width, rows.stride, other.stride, weight.const_data_ptr(),
                  is_f32, float(epsilon), out.mutable_data_ptr(),
                  residual_out == nullptr ? nullptr : residual_out->mutable_data_ptr()});
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

Tensor silu_and_mul(const Tensor& x) {
  const Rows rows(x);
  TORCH_CHECK(rows.width % 2 == 0, "x has an odd last dimension ", rows.width);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() /= 2;
  const Tensor out = empty_like_dtype(sizes, x);
  rbln::silu_and_mul({dtype_of(x, "x"), rows.data(), rows.count, rows.width / 2, rows.stride,
                      out.mutable_data_ptr()});
  return out;
}

std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& q,
                                            const Tensor& k, const Tensor& cos_sin_cache,
                                            int64_t head_size, bool is_neox) {
  check_dtype(k, "k", q);
  check_dtype(cos_sin_cache, "cos_sin_cache", q);
  const Rows queries(q), keys(k);
  const std::vector<int64_t> rows = integers(positions, "positions");
  const int64_t count = int64_t(rows.size());
  TORCH_CHECK(queries.count == count && keys.count == count, "q has ", queries.count,
              " rows and k ", keys.count, " for ", count, " positions");
  TORCH_CHECK(queries.width % head_size == 0 && keys.width % head_size == 0,
              "the widths of q and k, ", queries.width, " and ", keys.width,
              ", are not multiples of head_size ", head_size);
  TORCH_CHECK(cos_sin_cache.dim() == 2 && cos_sin_cache.stride(1) == 1 &&
                  cos_sin_cache.size(1) <= head_size && cos_sin_cache.size(1) % 2 == 0,
              "cos_sin_cache has shape ", cos_sin_cache.sizes(), " for head_size ", head_size);
  for (int64_t position : rows)
    TORCH_CHECK_INDEX(position >= 0 && position < cos_sin_cache.size(0), "position ", position,
                      " is outside the rotary cache of ", cos_sin_cache.size(0));
  const Tensor q_out = empty_like_dtype(q.sizes(), q), k_out = empty_like_dtype(k.sizes(), k);
  rbln::rotary_embedding(
      {dtype_of(q, "q"), rows.data(), cos_sin_cache.const_data_ptr(), cos_sin_cache.stride(0),
       cos_sin_cache.size(1), head_size, is_neox, count,
       {{queries.data(), queries.width / head_size, queries.stride, q_out.mutable_data_ptr()},
        {keys.data(), keys.width / head_size, keys.stride, k_out.mutable_data_ptr()}}});
  return {q_out, k_out};
}

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache,
                     const Tensor& tables) {
  TORCH_CHECK(q.dim() == 5 && k.dim() == 5 && v.sizes() == k.sizes() && cache.dim() == 6,
              "expected q [B,Hkv,G,L,D], k and v [B,Hkv,1,L,D], kv_cache [N,2,Hkv,1,S,D], got ",
              q.sizes(), ", ", k.sizes(), ", ", v.sizes(), ", ", cache.sizes());
  for (const Tensor* tensor : {&k, &v, &cache}) check_dtype(*tensor, "k, v or kv_cache", q);
  TORCH_CHECK(k.size(0) == q.size(0) && k.size(1) == q.size(1) && k.size(2) == 1 &&
                  k.size(3) == q.size(3) && k.size(4) == q.size(4) && cache.size(1) == 2 &&
                  cache.size(2) == q.size(1) && cache.size(3) == 1 && cache.size(5) == q.size(4),
              "q ", q.sizes(), ", k ", k.sizes(), " and kv_cache ", cache.sizes(), " disagree");
  TORCH_CHECK(q.stride(4) == 1 && k.stride(4) == 1 && v.stride(4) == 1 && cache.stride(5) == 1,
              "the head dimension of q, k, v and kv_cache must be contiguous");
  TORCH_CHECK(tables.numel() > 0 && tables.numel() % q.size(0) == 0, "block_tables has shape ",
              tables.sizes(), " for a batch of ", q.size(0));
}

// Sums each request's partitions and checks every block that its keys will be read from.
std::vector<int64_t> checked_starts(const Tensor& seq_idx, const std::vector<int64_t>& tables,
                                    int64_t batch, int64_t length, const Tensor& cache) {
  const std::vector<int64_t> parts = integers(seq_idx, "seq_idx");
  TORCH_CHECK(!parts.empty() && int64_t(parts.size()) % batch == 0, "seq_idx has shape ",
              seq_idx.sizes(), " for a batch of ", batch);
  const int64_t per_request = int64_t(parts.size()) / batch;
  const int64_t width = int64_t(tables.size()) / batch, block_size = cache.size(4);
  std::vector<int64_t> starts(static_cast<size_t>(batch), 0);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t p = 0; p < per_request; ++p) starts[b] += parts[b * per_request + p];
    TORCH_CHECK(starts[b] >= 0, "seq_idx[", b, "] sums to ", starts[b]);
    const int64_t used = std::min(width, (starts[b] + length + block_size - 1) / block_size);
    for (int64_t p = 0; p < used; ++p) {
      const int64_t block = tables[b * width + p];
      TORCH_CHECK_INDEX(block >= 0 && block < cache.size(0), "block_tables[", b, "][", p, "] is ",
                        block, ", the cache has ", cache.size(0), " blocks");
    }
  }
  return starts;
}

// The options of every attention op, and what all of them hand to the kernels.
struct AttentionCall {
  Tensor sinks, out;
  rbln::AttentionArgs args{};

  AttentionCall(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache,
                const Tensor& scale, const std::optional<Tensor>& sink_logits,
                std::optional<double> soft_cap) {
    const int64_t batch = q.size(0), heads = q.size(1), group = q.size(2), length = q.size(3);
    TORCH_CHECK(scale.numel() == 1 && scale.scalar_type() == at::kFloat,
                "scale is not a float32 scalar tensor");
    TORCH_CHECK(!soft_cap.has_value() || *soft_cap > 0, "logits_soft_cap is ", soft_cap.value_or(0),
                "; it must be positive");
    if (sink_logits.has_value()) {
      TORCH_CHECK(sink_logits->numel() == heads * group, "sinks has ", sink_logits->numel(),
                  " elements for ", heads * group, " query heads");
      sinks = sink_logits->to(at::kFloat).contiguous();
      args.sinks = sinks.const_data_ptr<float>();
    }
    out = empty_like_dtype({batch, length, heads, group, q.size(4)}, q);
    args.dtype = dtype_of(q, "q");
    args.q = q.const_data_ptr();
    args.k = k.const_data_ptr();
    args.v = v.const_data_ptr();
    args.q_stride = {q.stride(0), q.stride(1), q.stride(2), q.stride(3)};
    args.k_stride = {k.stride(0), k.stride(1), k.stride(2), k.stride(3)};
    args.v_stride = {v.stride(0), v.stride(1), v.stride(2), v.stride(3)};
    args.cache = cache.mutable_data_ptr();
    args.cache_stride = {cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(4)};
    args.batch = batch;
    args.kv_heads = heads;
    args.group = group;
    args.length = length;
    args.head_size = q.size(4);
    args.block_size = cache.size(4);
    args.scale = *scale.const_data_ptr<float>();
    args.soft_cap = float(soft_cap.value_or(0));
    args.out = out.mutable_data_ptr();
  }

  Tensor result() const { return out.permute({0, 2, 3, 1, 4}); }
};

Tensor flash_causal(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                    const Tensor& scale, const Tensor& seq_idx, const Tensor& block_tables,
                    const Tensor& /*slot_mapping*/, const std::optional<Tensor>& sinks,
                    std::optional<double> soft_cap) {
  check_attention(q, k, v, kv_cache, block_tables);
  const std::vector<int64_t> tables = integers(block_tables, "block_tables");
  const std::vector<int64_t> starts =
      checked_starts(seq_idx, tables, q.size(0), q.size(3), kv_cache);
  AttentionCall call(q, k, v, kv_cache, scale, sinks, soft_cap);
  call.args.table_width = int64_t(tables.size()) / q.size(0);
  call.args.starts = starts.data();
  call.args.tables = tables.data();
  rbln::causal_attention(call.args);
  return call.result();
}

// The one-block ops take seq_idx before scale.
Tensor one_block_causal(const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& kv_cache, const Tensor& seq_idx, const Tensor& scale,
                        const Tensor& block_tables, const Tensor& dummy,
                        const std::optional<Tensor>& sinks, std::optional<double> soft_cap) {
  return flash_causal(q, k, v, kv_cache, scale, seq_idx, block_tables, dummy, sinks, soft_cap);
}

// One whole number per request.
std::vector<int64_t> per_request(const Tensor& tensor, const char* name, int64_t batch) {
  TORCH_CHECK(tensor.numel() == batch, name, " has shape ", tensor.sizes(), " for a batch of ",
              batch);
  return integers(tensor, name);
}

// The new tokens of every request; 0 for padding, of which nothing else is looked at.
std::vector<int64_t> checked_counts(const std::vector<int64_t>& cached,
                                    const std::vector<int64_t>& ends,
                                    const std::vector<int64_t>& blocks, int64_t length,
                                    const Tensor& cache) {
  std::vector<int64_t> counts(cached.size());
  for (size_t b = 0; b < cached.size(); ++b) {
    counts[b] = std::max<int64_t>(0, ends[b] - cached[b]);
    if (counts[b] == 0) continue;
    TORCH_CHECK(cached[b] >= 0 && cached[b] <= cache.size(4), "cache_seq_len[", b, "] is ",
                cached[b], ", the window has ", cache.size(4), " slots");
    TORCH_CHECK(counts[b] <= length, "cache_offset[", b, "] is ", ends[b], ", ", counts[b],
                " more than cache_seq_len, but q has ", length, " rows");
    TORCH_CHECK_INDEX(blocks[b] >= 0 && blocks[b] < cache.size(0), "block_tables[", b, "] is ",
                      blocks[b], ", the cache has ", cache.size(0), " blocks");
  }
  return counts;
}

Tensor window_prefill(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                      const Tensor& cache_seq_len, const Tensor& cache_offset,
                      const Tensor& scale, const Tensor& block_tables, const Tensor& /*dummy*/,
                      const std::optional<Tensor>& sinks, std::optional<double> soft_cap) {
  check_attention(q, k, v, kv_cache, block_tables);
  const int64_t batch = q.size(0);
  const std::vector<int64_t> cached = per_request(cache_seq_len, "cache_seq_len", batch),
                             ends = per_request(cache_offset, "cache_offset", batch),
                             blocks = per_request(block_tables, "block_tables", batch),
                             counts = checked_counts(cached, ends, blocks, q.size(3), kv_cache);
  AttentionCall call(q, k, v, kv_cache, scale, sinks, soft_cap);
  call.args.table_width = 1;
  call.args.starts = cached.data();
  call.args.counts = counts.data();
  call.args.tables = blocks.data();
  rbln::window_attention(call.args);
  return call.result();
}

// The mask says again what cache_seq_len says; see attention/ops.py.
Tensor window_decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                     const Tensor& cache_seq_len, const Tensor& cache_offset, const Tensor& scale,
                     const Tensor& block_tables, const Tensor& dummy,
                     const std::optional<Tensor>& /*attn_mask*/,
                     const std::optional<Tensor>& sinks, std::optional<double> soft_cap) {
  return window_prefill(q, k, v, kv_cache, cache_seq_len, cache_offset, scale, block_tables, dummy,
                        sinks, soft_cap);
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
  m.impl("linear", TORCH_FN(linear));
  m.impl("rms_norm", TORCH_FN(rms_norm));
  m.impl("fused_add_rms_norm", TORCH_FN(fused_add_rms_norm));
  m.impl("silu_and_mul", TORCH_FN(silu_and_mul));
  m.impl("rotary_embedding", TORCH_FN(rotary_embedding));
  m.impl("moe_route", TORCH_FN(rbln::moe_route_tensors));
  m.impl("moe", TORCH_FN(rbln::moe_tensors));
}

TORCH_LIBRARY_IMPL(rbln_custom_ops, CPU, m) {
  m.impl("flash_causal_attention_naive_prefill", TORCH_FN(flash_causal));
  m.impl("flash_causal_attention_naive_decode", TORCH_FN(flash_causal));
  m.impl("causal_attention_naive_prefill", TORCH_FN(one_block_causal));
  m.impl("causal_attention_naive_decode", TORCH_FN(one_block_causal));
  m.impl("sliding_window_attention_naive_prefill", TORCH_FN(window_prefill));
  m.impl("sliding_window_attention_naive_decode", TORCH_FN(window_decode));
}
