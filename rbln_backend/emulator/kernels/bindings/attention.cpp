// Attention over tensors: attention/ops.py and emulator/ops.py say what the ops compute.
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "attention/attention.h"
#include "bindings/tensors.h"

namespace rbln::bindings {
namespace {

using at::Tensor;

// Rows of one of q, k, v: where they lie, for kernels that read heads through strides.
struct Heads {
  const void* data;
  TokenStrides stride;
};

Heads heads_of(const Tensor& t) {
  return {t.const_data_ptr(), {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}};
}

struct Sizes {
  int64_t batch, kv_heads, group, length, head_size, value_size;
};

// What a layer may ask for; attention/ops.py says what they mean.
struct Options {
  std::optional<Tensor> sinks;
  std::optional<double> soft_cap;
  std::optional<Tensor> slopes;
  std::optional<int64_t> chunk = std::nullopt;
};

void check_tables(const Tensor& tables, int64_t batch) {
  TORCH_CHECK(tables.numel() > 0 && tables.numel() % batch == 0, "block_tables has shape ",
              tables.sizes(), " for a batch of ", batch);
}

Sizes check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache,
                      const Tensor& tables) {
  TORCH_CHECK(q.dim() == 5 && k.dim() == 5 && v.dim() == 5 && cache.dim() == 6 &&
                  v.sizes().slice(0, 4) == k.sizes().slice(0, 4) && v.size(4) <= k.size(4),
              "expected q [B,Hkv,G,L,D], k and v [B,Hkv,1,L,D], kv_cache [N,2,Hkv,1,S,D], got ",
              q.sizes(), ", ", k.sizes(), ", ", v.sizes(), ", ", cache.sizes());
  for (const Tensor* tensor : {&k, &v, &cache}) check_dtype(*tensor, "k, v or kv_cache", q);
  TORCH_CHECK(k.size(0) == q.size(0) && k.size(1) == q.size(1) && k.size(2) == 1 &&
                  k.size(3) == q.size(3) && k.size(4) == q.size(4) && cache.size(1) == 2 &&
                  cache.size(2) == q.size(1) && cache.size(3) == 1 && cache.size(5) == q.size(4),
              "q ", q.sizes(), ", k ", k.sizes(), " and kv_cache ", cache.sizes(), " disagree");
  TORCH_CHECK(q.stride(4) == 1 && k.stride(4) == 1 && v.stride(4) == 1 && cache.stride(5) == 1,
              "the head dimension of q, k, v and kv_cache must be contiguous");
  check_tables(tables, q.size(0));
  return {q.size(0), q.size(1), q.size(2), q.size(3), q.size(4), v.size(4)};
}

// The first query position of each request; checks every block that its keys will be read from.
std::vector<int64_t> checked_starts(const Tensor& seq_idx, const std::vector<int64_t>& tables,
                                    int64_t batch, int64_t length, const Tensor& cache) {
  std::vector<int64_t> starts = integers(seq_idx, "seq_idx");
  TORCH_CHECK(int64_t(starts.size()) == batch, "seq_idx has shape ", seq_idx.sizes(),
              " for a batch of ", batch);
  const int64_t width = int64_t(tables.size()) / batch, block_size = cache.size(4);
  for (int64_t b = 0; b < batch; ++b) {
    TORCH_CHECK(starts[b] >= 0, "seq_idx[", b, "] is ", starts[b]);
    const int64_t used = std::min(width, (starts[b] + length + block_size - 1) / block_size);
    for (int64_t p = 0; p < used; ++p) {
      const int64_t block = tables[b * width + p];
      TORCH_CHECK_INDEX(block >= 0 && block < cache.size(0), "block_tables[", b, "][", p, "] is ",
                        block, ", the cache has ", cache.size(0), " blocks");
    }
  }
  return starts;
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

// A number for each query head, as float32; undefined where there is none.
Tensor by_head(const std::optional<Tensor>& given, const char* name, int64_t query_heads) {
  if (!given.has_value()) return {};
  TORCH_CHECK(given->numel() == query_heads, name, " has ", given->numel(), " elements for ",
              query_heads, " query heads");
  const Tensor numbers = given->to(at::kFloat).contiguous();
  if (!numbers.is_same(*given)) forbid_replay();
  return numbers;
}

const float* data_of(const Tensor& numbers) {
  return numbers.defined() ? numbers.const_data_ptr<float>() : nullptr;
}

// What every attention op hands to the kernels.
struct AttentionCall {
  Tensor sinks, slopes, out;
  AttentionArgs args{};

  AttentionCall(const Sizes& sizes, const Heads& q, const Heads& k, const Heads& v,
                const Tensor& cache, const Tensor& scale, const Options& options) {
    const int64_t query_heads = sizes.kv_heads * sizes.group;
    const double soft_cap = options.soft_cap.value_or(1);
    const int64_t chunk = options.chunk.value_or(1);
    TORCH_CHECK(scale.numel() == 1 && scale.scalar_type() == at::kFloat,
                "scale is not a float32 scalar tensor");
    TORCH_CHECK(soft_cap > 0, "logits_soft_cap is ", soft_cap, "; it must be positive");
    TORCH_CHECK(chunk > 0, "attention_chunk is ", chunk, "; it must be positive");
    sinks = by_head(options.sinks, "sinks", query_heads);
    slopes = by_head(options.slopes, "alibi_slopes", query_heads);
    args.sinks = data_of(sinks);
    args.slopes = data_of(slopes);
    out = empty_like_dtype({sizes.batch * sizes.length, query_heads * sizes.value_size}, cache);
    args.dtype = dtype_of(cache, "q");
    args.q = q.data;
    args.k = k.data;
    args.v = v.data;
    args.q_stride = q.stride;
    args.k_stride = k.stride;
    args.v_stride = v.stride;
    args.cache = cache.mutable_data_ptr();
    args.cache_stride = {cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(4)};
    args.batch = sizes.batch;
    args.kv_heads = sizes.kv_heads;
    args.group = sizes.group;
    args.length = sizes.length;
    args.head_size = args.k_size = sizes.head_size;
    args.value_size = args.v_size = sizes.value_size;
    args.v_place = cache.stride(1);
    args.block_size = cache.size(4);
    args.scale = *scale.const_data_ptr<float>();
    args.soft_cap = float(options.soft_cap.value_or(0));
    args.chunk = options.chunk.value_or(0);
    args.out = out.mutable_data_ptr();
  }

  void run_causal(const Tensor& seq_idx, const Tensor& block_tables, const Tensor& cache) {
    launch([args = args, seq_idx, block_tables, cache]() mutable {
      const std::vector<int64_t> tables = integers(block_tables, "block_tables");
      const std::vector<int64_t> starts =
          checked_starts(seq_idx, tables, args.batch, args.length, cache);
      args.table_width = int64_t(tables.size()) / args.batch;
      args.starts = starts.data();
      args.tables = tables.data();
      causal_attention(args);
    });
  }

  void run_window(const Tensor& cache_seq_len, const Tensor& cache_offset,
                  const Tensor& block_tables, const Tensor& cache) {
    launch([args = args, cache_seq_len, cache_offset, block_tables, cache]() mutable {
      const std::vector<int64_t> cached = per_request(cache_seq_len, "cache_seq_len", args.batch),
                                 ends = per_request(cache_offset, "cache_offset", args.batch),
                                 blocks = per_request(block_tables, "block_tables", args.batch),
                                 counts = checked_counts(cached, ends, blocks, args.length, cache);
      args.table_width = 1;
      args.starts = cached.data();
      args.counts = counts.data();
      args.tables = blocks.data();
      window_attention(args);
    });
  }

  // The documented ops' [B, Hkv, G, L, D].
  Tensor result() const {
    return out.view({args.batch, args.length, args.kv_heads, args.group, args.value_size})
        .permute({0, 2, 3, 1, 4});
  }
};

// Heads in rows of tokens: [tokens, heads * head_size] from a column on.
struct HeadRows {
  Tensor tensor;  // keeps the memory
  const void* data;
  int64_t stride, heads, head_size;

  HeadRows(const Tensor& source, const char* name, int64_t column, int64_t tokens, int64_t heads_,
           int64_t head_size_)
      : tensor(source), stride(source.stride(0)), heads(heads_), head_size(head_size_) {
    TORCH_CHECK(source.dim() == 2 && source.size(0) == tokens && source.stride(1) == 1 &&
                    column >= 0 && column + heads * head_size <= source.size(1),
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
    return {data, {length * stride, group * head_size, head_size, stride}};
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
  launch([args] { rms_norm(args); });
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

Tensor flash_causal(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                    const Tensor& scale, const Tensor& seq_idx, const Tensor& block_tables,
                    const Tensor& /*slot_mapping*/, const std::optional<Tensor>& sinks,
                    std::optional<double> soft_cap, const std::optional<Tensor>& slopes,
                    std::optional<int64_t> chunk) {
  const Sizes sizes = check_attention(q, k, v, kv_cache, block_tables);
  AttentionCall call(sizes, heads_of(q), heads_of(k), heads_of(v), kv_cache, scale,
                     {sinks, soft_cap, slopes, chunk});
  call.run_causal(seq_idx, block_tables, kv_cache);
  return call.result();
}

// The one-block ops take seq_idx before scale.
Tensor one_block_causal(const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& kv_cache, const Tensor& seq_idx, const Tensor& scale,
                        const Tensor& block_tables, const Tensor& dummy,
                        const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                        const std::optional<Tensor>& slopes, std::optional<int64_t> chunk) {
  return flash_causal(q, k, v, kv_cache, scale, seq_idx, block_tables, dummy, sinks, soft_cap,
                      slopes, chunk);
}

Tensor window_prefill(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                      const Tensor& cache_seq_len, const Tensor& cache_offset,
                      const Tensor& scale, const Tensor& block_tables, const Tensor& /*dummy*/,
                      const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                      const std::optional<Tensor>& slopes) {
  const Sizes sizes = check_attention(q, k, v, kv_cache, block_tables);
  AttentionCall call(sizes, heads_of(q), heads_of(k), heads_of(v), kv_cache, scale,
                     {sinks, soft_cap, slopes});
  call.run_window(cache_seq_len, cache_offset, block_tables, kv_cache);
  return call.result();
}

// The mask says again what cache_seq_len says.
Tensor window_decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                     const Tensor& cache_seq_len, const Tensor& cache_offset, const Tensor& scale,
                     const Tensor& block_tables, const Tensor& dummy,
                     const std::optional<Tensor>& /*attn_mask*/,
                     const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                     const std::optional<Tensor>& slopes) {
  return window_prefill(q, k, v, kv_cache, cache_seq_len, cache_offset, scale, block_tables, dummy,
                        sinks, soft_cap, slopes);
}

Tensor self_attention(const Tensor& q, int64_t q_column, const Tensor& k, int64_t k_column,
                      const Tensor& v, int64_t v_column, const std::optional<Tensor>& q_norm,
                      const std::optional<Tensor>& k_norm, double eps,
                      const std::optional<Tensor>& positions,
                      const std::optional<Tensor>& cos_sin_cache, bool is_neox,
                      const Tensor& kv_cache, const Tensor& scale, const Tensor& starts,
                      const std::optional<Tensor>& ends, const Tensor& block_tables,
                      const std::optional<Tensor>& sinks, std::optional<double> soft_cap,
                      const std::optional<Tensor>& slopes, std::optional<int64_t> chunk,
                      int64_t group, int64_t batch) {
  TORCH_CHECK(kv_cache.dim() == 6 && kv_cache.size(1) == 2 && kv_cache.size(3) == 1 &&
                  kv_cache.stride(5) == 1,
              "kv_cache has shape ", kv_cache.sizes(), " instead of [N,2,Hkv,1,S,D]");
  for (const Tensor* tensor : {&q, &k, &v}) check_dtype(*tensor, "q, k or v", kv_cache);
  TORCH_CHECK(batch > 0 && group > 0 && q.dim() == 2 && q.size(0) % batch == 0, "q has shape ",
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
                     kv_cache, scale, {sinks, soft_cap, slopes, chunk});
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
                        const Tensor& block_tables, int64_t batch) {
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
    return Heads{t.const_data_ptr(), {length * t.stride(0), 0, head, t.stride(0)}};
  };
  const Sizes sizes{batch, 1, heads, length, q.size(2), latent};
  AttentionCall call(sizes, rows(q, q.stride(1)), rows(kv_c, 0), rows(k_pe, 0), kv_cache, scale,
                     {});
  call.args.cache_stride.kv = 0;
  call.args.k_size = call.args.v_place = latent;
  call.args.v_size = turned;
  call.run_causal(seq_idx, block_tables, kv_cache);
  return call.out.view({tokens, heads, latent});
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_emulated_ops, CPU, m) {
  m.impl("flash_causal_attention_naive_prefill", TORCH_FN(flash_causal));
  m.impl("flash_causal_attention_naive_decode", TORCH_FN(flash_causal));
  m.impl("causal_attention_naive_prefill", TORCH_FN(one_block_causal));
  m.impl("causal_attention_naive_decode", TORCH_FN(one_block_causal));
  m.impl("sliding_window_attention_naive_prefill", TORCH_FN(window_prefill));
  m.impl("sliding_window_attention_naive_decode", TORCH_FN(window_decode));
}

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("self_attention", TORCH_FN(self_attention));
  m.impl("latent_attention", TORCH_FN(latent_attention));
}

}  // namespace rbln::bindings
