// Conversions of tensors to kernel arguments: element types, rows, fresh outputs.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "bindings/replay.h"
#include "rows/rows.h"

namespace rbln {

inline Dtype dtype_of(at::ScalarType dtype, const char* name) {
  switch (dtype) {
    case at::kFloat: return Dtype::f32;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    default:
      TORCH_CHECK(false, name, " has dtype ", dtype,
                  "; the kernels take float32, bfloat16 and float16");
  }
}

inline Dtype dtype_of(const at::Tensor& tensor, const char* name) {
  return dtype_of(tensor.scalar_type(), name);
}

inline void check_dtype(const at::Tensor& tensor, const char* name, const at::Tensor& like) {
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), name, " has dtype ",
              tensor.scalar_type(), " instead of ", like.scalar_type());
}

inline at::Tensor empty_of(at::IntArrayRef sizes, at::ScalarType dtype) {
  if (is_recording()) {
    const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    return at::detail::empty_generic(sizes, arena(), cpu, dtype, std::nullopt);
  }
  return at::detail::empty_cpu(sizes, dtype);
}

inline at::Tensor empty_like_dtype(at::IntArrayRef sizes, const at::Tensor& like) {
  return empty_of(sizes, like.scalar_type());
}

// Looked at when a call is made: a recorded one finds other slots.
inline void check_slots(const int32_t* slots, int64_t requests, int64_t count) {
  for (int64_t r = 0; r < requests; ++r)
    TORCH_CHECK_INDEX(slots[r] >= -1 && slots[r] < count, "slots[", r, "] is ", slots[r],
                      ", and there are ", count, " slots");
}

// int32 adapter slots of `rows` rows; as many requests as there are slots.
inline const int32_t* slots_over(const at::Tensor& slots, int64_t rows) {
  TORCH_CHECK(slots.scalar_type() == at::kInt && slots.is_contiguous() && slots.numel() > 0 &&
                  rows % slots.numel() == 0,
              "slots is ", slots.scalar_type(), " ", slots.sizes(), ", not int32 over ", rows,
              " rows");
  return slots.const_data_ptr<int32_t>();
}

// The values of an int32 or int64 tensor, in order.
inline std::vector<int64_t> integers(const at::Tensor& tensor, const char* name) {
  std::vector<int64_t> values(size_t(tensor.numel()));
  const at::Tensor dense = tensor.contiguous();
  if (tensor.scalar_type() == at::kInt) {
    std::copy_n(dense.const_data_ptr<int32_t>(), values.size(), values.begin());
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kLong, name, " has dtype ", tensor.scalar_type(),
                " instead of int32 or int64");
    std::copy_n(dense.const_data_ptr<int64_t>(), values.size(), values.begin());
  }
  return values;
}

// The rows of a rotary table [max_position, rotary_dim] that `count` tokens turn by.
inline std::vector<int64_t> checked_positions(const at::Tensor& positions, int64_t count,
                                              const at::Tensor& table, int64_t head_size) {
  std::vector<int64_t> rows = integers(positions, "positions");
  TORCH_CHECK(int64_t(rows.size()) == count, "q and k have ", count, " rows for ", rows.size(),
              " positions");
  TORCH_CHECK(table.dim() == 2 && table.stride(1) == 1 && table.size(1) <= head_size &&
                  table.size(1) % 2 == 0,
              "cos_sin_cache has shape ", table.sizes(), " for head_size ", head_size);
  for (int64_t position : rows)
    TORCH_CHECK_INDEX(position >= 0 && position < table.size(0), "position ", position,
                      " is outside the rotary cache of ", table.size(0));
  return rows;
}

// Turns the rows by what `positions` holds at each run.
inline void launch_rotary(RotaryArgs args, const at::Tensor& positions, const at::Tensor& table) {
  launch([args, count = args.rows, positions, table]() mutable {
    const std::vector<int64_t> rows = checked_positions(positions, count, table, args.head_size);
    args.positions = rows.data();
    args.rows = useful_rows(int64_t(rows.size()));
    rotary_embedding(args);
  });
}

// A tensor seen as rows of its last dimension at one stride; copied only when it cannot be.
struct Rows {
  at::Tensor tensor;
  int64_t count = 1, width, stride = 0;

  explicit Rows(const at::Tensor& source) : tensor(source), width(source.size(-1)) {
    if (!collapse()) {
      forbid_replay();
      tensor = source.contiguous();
      collapse();
    }
  }

  const void* data() const { return tensor.const_data_ptr(); }

 private:
  bool collapse() {
    count = 1;
    stride = width;
    if (width > 1 && tensor.stride(-1) != 1) return false;
    bool first = true;
    for (int64_t d = tensor.dim() - 2; d >= 0; --d) {
      if (tensor.size(d) == 1) continue;
      if (first) {
        stride = tensor.stride(d);
        first = false;
      } else if (tensor.stride(d) != stride * count) {
        return false;
      }
      count *= tensor.size(d);
    }
    return true;
  }
};

}  // namespace rbln
