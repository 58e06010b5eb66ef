// The index of each row's largest value: greedy sampling, straight from the LM head's element type.
#include <algorithm>
#include <limits>

#include "core/simd.h"
#include "core/team.h"
#include "rows/rows.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 17;

// The largest value; NaN is never larger.
template <class T>
float largest(const T* row, int64_t width) {
  const VecF lowest = broadcast(-std::numeric_limits<float>::infinity());
  VecF found[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      found[part] = max(load_some(row + i + part * kLanes, kLanes), found[part]);
    }
  }
  for (; i + kLanes <= width; i += kLanes) found[0] = max(load_some(row + i, kLanes), found[0]);
  const VecF all = max(max(found[0], found[1]), max(found[2], found[3]));
  float best = all[0];
  for (int lane = 1; lane < kLanes; ++lane) best = std::max(best, all[lane]);
  for (; i < width; ++i) best = std::max(best, load_some(row + i, 1)[0]);
  return best;
}

template <class T>
int32_t first_of(const T* row, int64_t width, float value) {
  const VecF wanted = broadcast(value);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const VecI equal = load_some(row + i, kLanes) == wanted;
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= equal[lane];
    if (any != 0) break;
  }
  for (; i < width; ++i) {
    if (load_some(row + i, 1)[0] == value) return int32_t(i);
  }
  return 0;
}

}  // namespace

void greedy(const GreedyArgs& args) {
  RBLN_DISPATCH(args.dtype, T, {
    const int threads = team_size(args.rows * args.width, kSerialElements);
    parallel_for(args.rows, 1, threads, [&](int64_t r) {
      const T* row = static_cast<const T*>(args.x) + r * args.x_stride;
      args.out[r] = first_of(row, args.width, largest(row, args.width));
    });
  });
}

}  // namespace rbln
