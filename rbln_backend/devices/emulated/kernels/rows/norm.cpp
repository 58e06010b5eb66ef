// RMS normalisation, alone or with the residual addition, rounding where vLLM's reference rounds;
// layer normalisation, rounded once.
#include <algorithm>
#include <cmath>

#include "core/functions.h"
#include "core/team.h"
#include "rows/rows.h"

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

// Folds f(vector, sum, lanes of it) over a row: four interleaved partial sums, merged in a fixed
// order. Lanes past the width hold 0.
template <class T, class F>
float sum_over(const Row<T>& row, int64_t width, F f) {
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    for (int part = 0; part < 4; ++part)
      sums[part] = f(row.at(i + part * kLanes, kLanes), sums[part], kLanes);
  for (; i < width; i += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, width - i);
    sums[0] = f(row.at(i, lanes), sums[0], lanes);
  }
  return reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
float sum_of_squares(const Row<T>& row, int64_t width) {
  return sum_over(row, width, [](VecF x, VecF sum, int64_t) { return fma(x, x, sum); });
}

template <class T, class W>
void normalise(const NormArgs& args, int64_t r) {
  const int64_t group = r / args.heads, within = r % args.heads * args.width;
  const Row<T> row{
      static_cast<const T*>(args.x) + group * args.x_stride + within,
      args.residual == nullptr
          ? nullptr
          : static_cast<const T*>(args.residual) + group * args.residual_stride + within};
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

// Of the deviations from the mean: a mean of squares less the square of the mean would lose the
// small variance of a row with a large mean.
template <class T>
void normalise_layer(const LayerNormArgs& args, int64_t r) {
  const Row<T> row{static_cast<const T*>(args.x) + r * args.x_stride, nullptr};
  const float count = float(args.width);
  const float mean =
      sum_over(row, args.width, [](VecF x, VecF sum, int64_t) { return sum + x; }) / count;
  const float squares = sum_over(row, args.width, [&](VecF x, VecF sum, int64_t lanes) {
    float deviations[kLanes];
    store(deviations, x - mean);
    const VecF inside = load_some(deviations, lanes);
    return fma(inside, inside, sum);
  });
  const float inverse = 1.0f / std::sqrt(squares / count + args.epsilon);
  T* out = static_cast<T*>(args.out) + r * args.width;
  const T *weight = static_cast<const T*>(args.weight), *bias = static_cast<const T*>(args.bias);
  for (int64_t i = 0; i < args.width; i += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, args.width - i);
    VecF value = (row.at(i, lanes) - mean) * inverse;
    if (weight != nullptr) value = value * load_some(weight + i, lanes);
    if (bias != nullptr) value = value + load_some(bias + i, lanes);
    store_some(out + i, value, lanes);
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

void layer_norm(const LayerNormArgs& args) {
  const int threads = team_size(args.rows * args.width, kSerialElements);
  RBLN_DISPATCH(args.dtype, T, {
    parallel_for(args.rows, kRowsAtOnce, threads, [&](int64_t r) { normalise_layer<T>(args, r); });
  });
}

}  // namespace rbln
