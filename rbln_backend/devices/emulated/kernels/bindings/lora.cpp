// Low-rank adapters over tensors.
#include <torch/library.h>

#include "bindings/packed.h"
#include "bindings/tensors.h"
#include "lora/lora.h"

namespace rbln::bindings {
namespace {

using at::Tensor;

void add_lora_(const Tensor& y, const Tensor& x, const Tensor& slots, const Tensor& a,
               at::TensorList b, int64_t rank, at::IntArrayRef out_features) {
  check_dtype(y, "y", x);
  const Rows rows(x);
  LoraArgs args{};
  args.dtype = dtype_of(x, "x");
  args.x = rows.data();
  args.rows = rows.count;
  args.depth = rows.width;
  args.x_stride = rows.stride;
  args.slots = slots_over(slots, rows.count);
  args.requests = slots.numel();
  TORCH_CHECK(a.dim() > 0 && a.size(0) > 0 && rank > 0 && b.size() == out_features.size(),
              "there are ", b.size(), " slices for ", out_features.size(), " out_features");
  args.slot_count = a.size(0);
  args.rank = rank;
  const auto slices = int64_t(b.size());
  args.a_elements = check_packed(a, "a", args.slot_count, slices * rank, rows.width, x);
  args.a = a.const_data_ptr();
  int64_t columns = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const int64_t elements = check_packed(b[i], "b", args.slot_count, out_features[i], rank, x);
    args.slices.push_back({b[i].const_data_ptr(), elements, out_features[i]});
    columns += out_features[i];
  }
  TORCH_CHECK(y.is_contiguous() && y.dim() > 0 && y.size(-1) == columns &&
                  y.numel() == rows.count * columns,
              "y has shape ", y.sizes(), " instead of [", rows.count, ", ", columns, "]");
  args.y = y.mutable_data_ptr();
  launch_rows(args, [is_decode = args.requests == args.rows](LoraArgs& useful) {
    if (is_decode) useful.requests = useful.rows;
    check_slots(useful.slots, useful.requests, useful.slot_count);
    add_lora(useful);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(rbln_emulator, CPU, m) {
  m.impl("add_lora_", TORCH_FN(add_lora_));
}

}  // namespace rbln::bindings
