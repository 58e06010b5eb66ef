// Collectives over tensors, and what Python opens a channel by.
#include <torch/library.h>

#include <vector>

#include "bindings/exports.h"
#include "bindings/tensors.h"
#include "channel/channel.h"

namespace rbln::bindings {
namespace {

using at::Tensor;

// A copy of a strided tensor would be gone at the next replay.
Tensor dense(const Tensor& x) {
  if (x.is_contiguous()) return x;
  forbid_replay();
  return x.contiguous();
}

Tensor all_reduce(const Tensor& x, int64_t number) {
  const Tensor source = dense(x);
  const Tensor out = empty_like_dtype(x.sizes(), x);
  Channel* const line = &channel(number);
  launch([line, dtype = dtype_of(x, "x"), in = source.const_data_ptr(),
          target = out.mutable_data_ptr(), count = x.numel()] {
    line->all_reduce(dtype, in, target, count);
  });
  return out;
}

// The kernels go by the channel's ranks, whatever a graph says.
Channel& channel_of(int64_t number, int64_t world_size) {
  Channel& line = channel(number);
  TORCH_CHECK(line.ranks() == world_size, "a collective of ", world_size, " ranks over a channel of ",
              line.ranks());
  return line;
}

Tensor reduce_scatter(const Tensor& x, int64_t dim, int64_t world_size, int64_t number) {
  Channel* const line = &channel_of(number, world_size);
  TORCH_CHECK(dim == 0 && x.dim() > 0 && x.size(0) % world_size == 0,
              "x of shape ", x.sizes(), " does not fall into ", world_size, " parts along ", dim);
  const Tensor source = dense(x);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[0] /= world_size;
  const Tensor out = empty_like_dtype(sizes, x);
  launch([line, dtype = dtype_of(x, "x"), in = source.const_data_ptr(),
          target = out.mutable_data_ptr(), count = out.numel()] {
    line->reduce_scatter(dtype, in, target, count);
  });
  return out;
}

Tensor all_gather(const Tensor& x, int64_t dim, int64_t world_size, int64_t number) {
  Channel* const line = &channel_of(number, world_size);
  const Tensor source = dense(x);
  if (dim < 0) dim += x.dim();
  TORCH_CHECK(dim >= 0 && dim < x.dim(), "x has no dimension ", dim);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[size_t(dim)] *= world_size;
  int64_t rows = 1, row_bytes = int64_t(x.element_size());
  for (int64_t i = 0; i < x.dim(); ++i) (i < dim ? rows : row_bytes) *= x.size(i);
  const Tensor out = empty_like_dtype(sizes, x);
  launch([line, in = source.const_data_ptr(), target = out.mutable_data_ptr(), rows, row_bytes] {
    line->all_gather(in, target, rows, row_bytes);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_channels, CPU, m) {
  m.impl("all_reduce", TORCH_FN(all_reduce));
  m.impl("all_gather", TORCH_FN(all_gather));
  m.impl("reduce_scatter", TORCH_FN(reduce_scatter));
}

}  // namespace rbln::bindings

// See open_channel; for ctypes.
RBLN_EXPORT int64_t rbln_emulator_open_channel(const char* path, int rank, int ranks,
                                               int64_t seat_bytes, const int32_t* processes) {
  return rbln::open_channel(path, rank, ranks, seat_bytes, processes);
}

RBLN_EXPORT int64_t rbln_emulator_channel_bytes(int ranks, int64_t seat_bytes) {
  return rbln::channel_bytes(ranks, seat_bytes);
}
