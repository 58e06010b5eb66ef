// Shared parts of the attention bindings: sizes, options, and a call of the kernels.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "attention/attention.h"
#include "bindings/tensors.h"
#include "core/e4m3.h"

namespace rbln::bindings {

using at::Tensor;

// Rows of one of q, k, v: where they lie, for kernels that read heads through strides.
struct Heads {
  const void* data;
  TokenStrides stride;
  at::ScalarType dtype;
};

inline Heads heads_of(const Tensor& t) {
  return {t.const_data_ptr(), {t.stride(0), t.stride(1), t.stride(2), t.stride(3)}, t.scalar_type()};
}

struct Sizes {
  int64_t batch, kv_heads, group, length, head_size, value_size;
};

// Options of a layer; layers/attention_ops.py defines them.
struct Options {
  std::optional<Tensor> sinks;
  std::optional<double> soft_cap;
  std::optional<Tensor> slopes;
  // Of a cache of e4m3: what its keys and values are to be multiplied by.
  std::optional<Tensor> k_scale, v_scale;
  std::optional<int64_t> chunk = std::nullopt, window = std::nullopt;
  // The rows of each request, where those of several lie one after the other in a batch of one.
  std::optional<Tensor> counts = std::nullopt;
};

inline void check_tables(const Tensor& tables, int64_t batch) {
  TORCH_CHECK(batch > 0 && tables.numel() > 0 && tables.numel() % batch == 0, "block_tables has shape ",
              tables.sizes(), " for a batch of ", batch);
}

// Positions beyond any context, whose sums with lengths would overflow.
constexpr int64_t kPositions = int64_t{1} << 40;

// The first query position of each request; checks every block that its keys will be read from.
// Each has `length` rows, or as many as `counts` says.
inline std::vector<int64_t> checked_starts(const Tensor& seq_idx, const std::vector<int64_t>& tables,
                                    int64_t batch, int64_t length, const Tensor& cache,
                                    const std::vector<int64_t>& counts = {}) {
  std::vector<int64_t> starts = integers(seq_idx, "seq_idx");
  TORCH_CHECK(int64_t(starts.size()) == batch, "seq_idx has shape ", seq_idx.sizes(),
              " for a batch of ", batch);
  const int64_t width = int64_t(tables.size()) / batch, block_size = cache.size(4);
  for (int64_t b = 0; b < batch; ++b) {
    TORCH_CHECK(starts[b] >= 0 && starts[b] < kPositions, "seq_idx[", b, "] is ", starts[b]);
    const int64_t rows = counts.empty() ? length : counts[size_t(b)];
    const int64_t used =
        rows == 0 ? 0 : std::min(width, (starts[b] + rows + block_size - 1) / block_size);
    for (int64_t p = 0; p < used; ++p) {
      const int64_t block = tables[b * width + p];
      TORCH_CHECK_INDEX(block >= 0 && block < cache.size(0), "block_tables[", b, "][", p, "] is ",
                        block, ", the cache has ", cache.size(0), " blocks");
    }
  }
  return starts;
}

// One whole number per request.
inline std::vector<int64_t> per_request(const Tensor& tensor, const char* name, int64_t batch) {
  TORCH_CHECK(tensor.numel() == batch, name, " has shape ", tensor.sizes(), " for a batch of ",
              batch);
  return integers(tensor, name);
}

// The new tokens of every request; 0 for padding, of which nothing else is looked at.
inline std::vector<int64_t> checked_counts(const std::vector<int64_t>& cached,
                                    const std::vector<int64_t>& ends,
                                    const std::vector<int64_t>& blocks, int64_t length,
                                    const Tensor& cache) {
  std::vector<int64_t> counts(cached.size());
  for (size_t b = 0; b < cached.size(); ++b) {
    if (ends[b] <= cached[b]) continue;
    TORCH_CHECK(cached[b] >= 0 && ends[b] < kPositions, "cache_seq_len[", b, "] is ", cached[b],
                " and cache_offset ", ends[b]);
    counts[b] = ends[b] - cached[b];
    TORCH_CHECK(counts[b] <= length, "cache_offset[", b, "] is ", ends[b], ", ", counts[b],
                " more than cache_seq_len, but q has ", length, " rows");
    TORCH_CHECK_INDEX(blocks[b] >= 0 && blocks[b] < cache.size(0), "block_tables[", b, "] is ",
                      blocks[b], ", the cache has ", cache.size(0), " blocks");
  }
  return counts;
}

// The rows of each request, of `length` that lie one after the other.
inline std::vector<int64_t> checked_row_counts(const Tensor& counts, int64_t length) {
  std::vector<int64_t> rows = integers(counts, "query_counts");
  int64_t total = 0;
  for (const int64_t count : rows) {
    TORCH_CHECK(count >= 0, "query_counts has ", count);
    TORCH_CHECK(count <= length - total, "query_counts has ", uint64_t(total) + uint64_t(count),
                " rows, q ", length);
    total += count;
  }
  return rows;
}

// `args` without rows of padding: of a chunk's tokens, or of the requests of a decode step.
inline AttentionArgs with_useful_rows(AttentionArgs args) {
  args.writes_only = writes_only();
  if (args.batch == 1) {
    args.length = useful_rows(args.length);
  } else if (args.length == 1) {
    args.batch = useful_rows(args.batch);
  }
  return args;
}

// `args` with the `count` rows from `first` on alone.
inline AttentionArgs rows_alone(const AttentionArgs& args, int64_t first, int64_t count) {
  const int64_t size = args.dtype == Dtype::f32 ? 4 : 2, stored = args.is_e4m3 ? 1 : size;
  const auto moved = [first](const void* rows, const TokenStrides& stride, int64_t bytes) {
    return static_cast<const char*>(rows) + first * stride.token * bytes;
  };
  AttentionArgs own = args;
  own.q = moved(args.q, args.q_stride, size);
  own.k = moved(args.k, args.k_stride, stored);
  own.v = moved(args.v, args.v_stride, stored);
  own.out = static_cast<char*>(args.out) +
            first * args.kv_heads * args.group * args.value_size * size;
  own.length = count;
  return own;
}

// Calls attend(own, r) with the rows of each request r in turn; padding rows give zeros.
template <class Attend>
void for_each_request(const AttentionArgs& args, const std::vector<int64_t>& counts,
                      const Attend& attend) {
  int64_t first = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    if (counts[r] > 0) attend(rows_alone(args, first, counts[r]), r);
    first += counts[r];
  }
  std::fill(static_cast<char*>(rows_alone(args, first, 0).out),
            static_cast<char*>(rows_alone(args, args.length, 0).out), char{0});
}

// A number for each query head, as float32; undefined where there is none.
inline Tensor by_head(const std::optional<Tensor>& given, const char* name, int64_t query_heads) {
  if (!given.has_value()) return {};
  TORCH_CHECK(given->numel() == query_heads, name, " has ", given->numel(), " elements for ",
              query_heads, " query heads");
  const Tensor numbers = given->to(at::kFloat).contiguous();
  if (!numbers.is_same(*given)) forbid_replay();
  return numbers;
}

inline float number_of(const Tensor& scalar, const char* name) {
  TORCH_CHECK(scalar.numel() == 1 && scalar.scalar_type() == at::kFloat, name,
              " is not a float32 scalar tensor");
  return *scalar.const_data_ptr<float>();
}

inline const float* data_of(const Tensor& numbers) {
  return numbers.defined() ? numbers.const_data_ptr<float>() : nullptr;
}

// Arguments that every attention op passes to the kernels.
struct AttentionCall {
  Tensor sinks, slopes, out;
  Tensor stored_k, stored_v;  // of e4m3; keep the memory
  std::optional<Tensor> counts;
  AttentionArgs args{};

  AttentionCall(const Sizes& sizes, const Heads& q, const Heads& k, const Heads& v,
                const Tensor& cache, const Tensor& scale, const Options& options) {
    const int64_t query_heads = sizes.kv_heads * sizes.group;
    const double soft_cap = options.soft_cap.value_or(1);
    const int64_t chunk = options.chunk.value_or(1), window = options.window.value_or(1);
    TORCH_CHECK(soft_cap > 0, "logits_soft_cap is ", soft_cap, "; it must be positive");
    TORCH_CHECK(chunk > 0 && window > 0, "attention_chunk is ", chunk, " and attention_window ",
                window, "; they must be positive");
    sinks = by_head(options.sinks, "sinks", query_heads);
    slopes = by_head(options.slopes, "alibi_slopes", query_heads);
    args.sinks = data_of(sinks);
    args.slopes = data_of(slopes);
    out = empty_of({sizes.batch * sizes.length, query_heads * sizes.value_size}, q.dtype);
    args.dtype = dtype_of(q.dtype, "q");
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
    args.scale = number_of(scale, "scale");
    args.v_scale = 1;
    args.soft_cap = float(options.soft_cap.value_or(0));
    args.chunk = options.chunk.value_or(0);
    args.window = options.window.value_or(0);
    args.out = out.mutable_data_ptr();
    counts = options.counts;
    TORCH_CHECK(!counts.has_value() || (sizes.batch == 1 && counts->numel() > 0),
                "query_counts come with a batch of one, not of ", sizes.batch);
    check_cache(cache, q.dtype, options);
    if (options.k_scale.has_value()) store_as_e4m3(options);
  }

  static void check_cache(const Tensor& cache, at::ScalarType dtype, const Options& options) {
    const bool is_scaled = options.k_scale.has_value();
    TORCH_CHECK(is_scaled == options.v_scale.has_value(),
                "of k_scale and v_scale there is one alone");
    TORCH_CHECK(cache.scalar_type() == (is_scaled ? at::kFloat8_e4m3fn : dtype),
                "kv_cache has dtype ", cache.scalar_type(), is_scaled ? " with" : " without",
                " k_scale and v_scale, and q has ", dtype);
  }

  // The new tokens as the cache will hold them, which is what all tokens see of them.
  void store_as_e4m3(const Options& options) {
    const float k_scale = number_of(*options.k_scale, "k_scale");
    args.is_e4m3 = true;
    const float v_scale = number_of(*options.v_scale, "v_scale");
    args.scale *= k_scale * kE4m3Unit;
    args.v_scale = v_scale * kE4m3Unit;
    if (args.k_size == 0) return;
    stored_k = stored(args.k, args.k_stride, args.k_size, k_scale);
    stored_v = stored(args.v, args.v_stride, args.v_size, v_scale);
  }

  Tensor stored(const void*& rows, TokenStrides& stride, int64_t size, float scale) const {
    const Tensor bytes =
        empty_of({args.batch, args.length, args.kv_heads, size}, at::kFloat8_e4m3fn);
    const E4m3Args converted{args.dtype, rows, stride, args.batch, args.length, args.kv_heads,
                             size, scale, bytes.mutable_data_ptr()};
    launch([converted] { to_e4m3(converted); });
    rows = bytes.const_data_ptr();
    stride = {args.length * args.kv_heads * size, size, 0, args.kv_heads * size};
    return bytes;
  }

  void run_causal(const Tensor& seq_idx, const Tensor& block_tables, const Tensor& cache) {
    if (counts.has_value()) {
      run_causal_packed(seq_idx, block_tables, cache);
    } else {
      run_causal_batch(seq_idx, block_tables, cache);
    }
    if (args.k_size > 0) mark_cache_write();
  }

  void run_causal_batch(const Tensor& seq_idx, const Tensor& block_tables, const Tensor& cache) {
    launch([args = args, seq_idx, block_tables, cache] {
      const std::vector<int64_t> tables = integers(block_tables, "block_tables");
      const std::vector<int64_t> starts =
          checked_starts(seq_idx, tables, args.batch, args.length, cache);
      AttentionArgs useful = with_useful_rows(args);
      useful.table_width = int64_t(tables.size()) / args.batch;
      useful.starts = starts.data();
      useful.tables = tables.data();
      causal_attention(useful);
    });
  }

  void run_causal_packed(const Tensor& seq_idx, const Tensor& block_tables, const Tensor& cache) {
    launch([whole = args, counts = *counts, seq_idx, block_tables, cache] {
      AttentionArgs args = with_useful_rows(whole);
      const std::vector<int64_t> rows = checked_row_counts(counts, args.length);
      const auto requests = int64_t(rows.size());
      check_tables(block_tables, requests);
      const std::vector<int64_t> tables = integers(block_tables, "block_tables");
      const std::vector<int64_t> starts =
          checked_starts(seq_idx, tables, requests, args.length, cache, rows);
      args.table_width = int64_t(tables.size()) / requests;
      for_each_request(args, rows, [&](AttentionArgs own, size_t r) {
        own.starts = &starts[r];
        own.tables = &tables[r * size_t(args.table_width)];
        causal_attention(own);
      });
    });
  }

  void run_window_packed(const Tensor& cache_seq_len, const Tensor& cache_offset,
                         const Tensor& block_tables, const Tensor& cache) {
    launch([whole = args, counts = *counts, cache_seq_len, cache_offset, block_tables, cache] {
      AttentionArgs args = with_useful_rows(whole);
      const std::vector<int64_t> rows = checked_row_counts(counts, args.length);
      const auto requests = int64_t(rows.size());
      const std::vector<int64_t> cached = per_request(cache_seq_len, "cache_seq_len", requests),
                                 ends = per_request(cache_offset, "cache_offset", requests),
                                 blocks = per_request(block_tables, "block_tables", requests);
      TORCH_CHECK(checked_counts(cached, ends, blocks, args.length, cache) == rows,
                  "cache_offset and query_counts disagree");
      args.table_width = 1;
      for_each_request(args, rows, [&](AttentionArgs own, size_t r) {
        own.starts = &cached[r];
        own.counts = &rows[r];
        own.tables = &blocks[r];
        window_attention(own);
      });
    });
  }

  void run_window(const Tensor& cache_seq_len, const Tensor& cache_offset,
                  const Tensor& block_tables, const Tensor& cache) {
    if (counts.has_value()) {
      run_window_packed(cache_seq_len, cache_offset, block_tables, cache);
    } else {
      run_window_batch(cache_seq_len, cache_offset, block_tables, cache);
    }
    mark_cache_write();
  }

  void run_window_batch(const Tensor& cache_seq_len, const Tensor& cache_offset,
                        const Tensor& block_tables, const Tensor& cache) {
    launch([args = args, cache_seq_len, cache_offset, block_tables, cache] {
      const std::vector<int64_t> cached = per_request(cache_seq_len, "cache_seq_len", args.batch),
                                 ends = per_request(cache_offset, "cache_offset", args.batch),
                                 blocks = per_request(block_tables, "block_tables", args.batch),
                                 counts = checked_counts(cached, ends, blocks, args.length, cache);
      AttentionArgs useful = with_useful_rows(args);
      useful.table_width = 1;
      useful.starts = cached.data();
      useful.counts = counts.data();
      useful.tables = blocks.data();
      window_attention(useful);
    });
  }

  // The documented ops' [B, Hkv, G, L, D].
  Tensor result() const {
    return out.view({args.batch, args.length, args.kv_heads, args.group, args.value_size})
        .permute({0, 2, 3, 1, 4});
  }
};

}  // namespace rbln::bindings
