// RMS normalisation, alone or with the residual addition, rounding where vLLM's reference rounds.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 17;

template <class T>
struct Row {
  const T* x;
  const T* residual;

  VecF at(int64_t i, int64_t count) const {
    const VecF value = load_some(x + i, count);
    return residual == nullptr ? value : value + load_some(residual + i, count);
  }
};

// Four interleaved partial sums, merged in a fixed order.
template <class T>
float sum_of_squares(const Row<T>& row, int64_t width) {
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      const VecF value = row.at(i + part * kLanes, kLanes);
      sums[part] = fma(value, value, sums[part]);
    }
  }
  for (; i < width; i += kLanes) {
    const VecF value = row.at(i, std::min<int64_t>(kLanes, width - i));
    sums[0] = fma(value, value, sums[0]);
  }
  return reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T, class W>
void normalise(const NormArgs& args, int64_t r) {
  const Row<T> row{static_cast<const T*>(args.x) + r * args.x_stride,
                   args.residual == nullptr
                       ? nullptr
                       : static_cast<const T*>(args.residual) + r * args.residual_stride};
  const float variance = sum_of_squares(row, args.width) / float(args.width);
  const VecF inverse = broadcast(1.0f / std::sqrt(variance + args.epsilon));
  T* out = static_cast<T*>(args.out) + r * args.width;
  T* residual_out = static_cast<T*>(args.residual_out) + r * args.width;
  for (int64_t i = 0; i < args.width; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, args.width - i);
    const VecF value = row.at(i, count);
    if (args.residual_out != nullptr) store_some(residual_out + i, value, count);
    const VecF weight = load_some(static_cast<const W*>(args.weight) + i, count);
    store_some(out + i, rounded_to<W>(value * inverse) * weight, count);
  }
}

template <class T, class W>
void run(const NormArgs& args) {
  const int threads = team_size(args.rows * args.width, kSerialElements);
  parallel_for(args.rows, kRowsAtOnce, threads, [&](int64_t r) { normalise<T, W>(args, r); });
}

}  // namespace

void rms_norm(const NormArgs& args) {
  RBLN_DISPATCH(args.dtype, T, {
    if (args.weight_is_f32) {
      run<T, float>(args);
    } else {
      run<T, T>(args);
    }
  });
}

}  // namespace rbln
