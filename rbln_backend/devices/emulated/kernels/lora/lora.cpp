// y += (x A^T) B^T with the adapter of each row: two products of the linear kernel per adapter.
//
// The rows of one adapter are multiplied together, so that its weights are read once. Rows that do
// not lie together are copied together first; the linear kernel gives each row the bits it has
// alone, whoever its neighbours are. Rows without an adapter are not touched.
#include "lora/lora.h"

#include <algorithm>
#include <vector>

#include "core/simd.h"
#include "core/team.h"
#include "linear/linear.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 16;

int64_t total_columns(const LoraArgs& args) {
  int64_t total = 0;
  for (const LoraSlice& slice : args.slices) total += slice.columns;
  return total;
}

// The rows of the requests whose adapter lies in `slot`, in order.
void find_rows(const LoraArgs& args, int64_t slot, std::vector<int64_t>& rows) {
  const int64_t length = args.rows / args.requests;
  rows.clear();
  for (int64_t r = 0; r < args.requests; ++r) {
    if (args.slots[r] != slot) continue;
    for (int64_t i = 0; i < length; ++i) rows.push_back(r * length + i);
  }
}

template <class T>
struct Scratch {
  std::vector<T> gathered, hidden, delta;
  std::vector<int64_t> rows;

  static T* sized(std::vector<T>& memory, int64_t count) {
    if (int64_t(memory.size()) < count) memory.resize(size_t(count));
    return memory.data();
  }
};

// The activations of `rows`, one after the other at a common stride.
template <class T>
LinearArgs gather(const LoraArgs& args, Scratch<T>& scratch) {
  const std::vector<int64_t>& rows = scratch.rows;
  const auto count = int64_t(rows.size());
  const T* x = static_cast<const T*>(args.x);
  LinearArgs product{};
  product.dtype = args.dtype;
  product.rows = count;
  product.depth = args.depth;
  if (rows.back() - rows.front() + 1 == count) {
    product.x = x + rows.front() * args.x_stride;
    product.x_stride = args.x_stride;
    return product;
  }
  T* together = Scratch<T>::sized(scratch.gathered, count * args.depth);
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(x + rows[size_t(i)] * args.x_stride, args.depth, together + i * args.depth);
  product.x = together;
  product.x_stride = args.depth;
  return product;
}

template <class T>
void add_rows(const T* delta, int64_t columns, const std::vector<int64_t>& rows, T* y,
              int64_t y_stride) {
  const auto count = int64_t(rows.size());
  parallel_for(count, kRowsAtOnce, team_size(count * columns, kSerialElements), [&](int64_t i) {
    const T* source = delta + i * columns;
    T* target = y + rows[size_t(i)] * y_stride;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, columns - c);
      store_some(target + c, load_some(target + c, n) + load_some(source + c, n), n);
    }
  });
}

template <class T>
void add_adapter(const LoraArgs& args, int64_t slot, int64_t y_stride, Scratch<T>& scratch) {
  const auto count = int64_t(scratch.rows.size()), width = int64_t(args.slices.size()) * args.rank;
  LinearArgs down = gather(args, scratch);
  down.packed = static_cast<const T*>(args.a) + slot * args.a_elements;
  down.columns = width;
  down.out = Scratch<T>::sized(scratch.hidden, count * width);
  linear(down);
  T* y = static_cast<T*>(args.y);
  for (size_t s = 0; s < args.slices.size(); ++s) {
    const LoraSlice& slice = args.slices[s];
    T* delta = Scratch<T>::sized(scratch.delta, count * slice.columns);
    linear({args.dtype, scratch.hidden.data() + int64_t(s) * args.rank, count, args.rank, width,
            static_cast<const T*>(slice.b) + slot * slice.elements, nullptr, slice.columns, delta});
    add_rows(delta, slice.columns, scratch.rows, y, y_stride);
    y += slice.columns;
  }
}

template <class T>
void run(const LoraArgs& args) {
  thread_local Scratch<T> scratch;
  const int64_t y_stride = total_columns(args);
  for (int64_t slot = 0; slot < args.slot_count; ++slot) {
    find_rows(args, slot, scratch.rows);
    if (!scratch.rows.empty()) add_adapter<T>(args, slot, y_stride, scratch);
  }
}

}  // namespace

void add_lora(const LoraArgs& args) {
  const int32_t* end = args.slots + args.requests;
  if (std::all_of(args.slots, end, [](int32_t slot) { return slot < 0; })) return;
  RBLN_DISPATCH(args.dtype, T, run<T>(args));
}

}  // namespace rbln
