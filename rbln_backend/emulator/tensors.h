// What turns tensors into kernel arguments: element types, rows, fresh outputs.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include "kernels.h"

namespace rbln {

inline Dtype dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Dtype::f32;
    case at::kBFloat16: return Dtype::bf16;
    case at::kHalf: return Dtype::f16;
    default:
      TORCH_CHECK(false, name, " has dtype ", tensor.scalar_type(),
                  "; the kernels take float32, bfloat16 and float16");
  }
}

inline void check_dtype(const at::Tensor& tensor, const char* name, const at::Tensor& like) {
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), name, " has dtype ",
              tensor.scalar_type(), " instead of ", like.scalar_type());
}

inline at::Tensor empty_like_dtype(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::detail::empty_cpu(sizes, like.scalar_type());
}

// A tensor seen as rows of its last dimension at one stride; copied only when it cannot be.
struct Rows {
  at::Tensor tensor;
  int64_t count = 1, width, stride = 0;

  explicit Rows(const at::Tensor& source) : tensor(source), width(source.size(-1)) {
    if (!collapse()) {
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
