// The ops over a channel, as library.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

namespace rbln {

at::Tensor all_reduce_tensor(const at::Tensor& x, int64_t number);
at::Tensor reduce_scatter_tensor(const at::Tensor& x, int64_t dim, int64_t world_size,
                                 int64_t number);
at::Tensor all_gather_tensor(const at::Tensor& x, int64_t dim, int64_t world_size, int64_t number);

}  // namespace rbln
