// Types of the kernels' plain-pointer interfaces: element types, and the width of a panel.
//
// Strides are in elements and the innermost dimension is always contiguous. Nothing outside of
// bindings/ depends on torch, so the kernels compile in seconds.
#pragma once

#include <cstdint>

namespace rbln {

enum class Dtype { f32, bf16, f16 };

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Columns of one packed weight panel, in every layout and on every instruction set.
inline constexpr int64_t kPanel = 16;

// Runs the rest with T as the element type.
#define RBLN_DISPATCH(dtype, T, ...)   \
  switch (dtype) {                     \
    case ::rbln::Dtype::f32: {         \
      using T = float;                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case ::rbln::Dtype::bf16: {        \
      using T = ::rbln::bf16;          \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case ::rbln::Dtype::f16: {         \
      using T = ::rbln::f16;           \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
  }

}  // namespace rbln
