// The index of each row's largest value: greedy sampling, straight from the LM head's element type.
#include <algorithm>
#include <bit>
#include <limits>

#include "core/functions.h"
#include "core/team.h"
#include "rows/rows.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 17;

constexpr int64_t kBlock = 64 * kLanes;

// The largest value of each lane; NaN is never larger.
template <class T>
VecF largest_of_block(const T* block, int64_t width) {
  const VecF lowest = broadcast(-std::numeric_limits<float>::infinity());
  VecF found[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int part = 0; part < 4; ++part) {
      found[part] = max(load_some(block + i + part * kLanes, kLanes), found[part]);
    }
  }
  for (; i + kLanes <= width; i += kLanes) found[0] = max(load_some(block + i, kLanes), found[0]);
  VecF rest = lowest;
  for (int lane = 0; i + lane < width; ++lane) rest[lane] = load_some(block + i + lane, 1)[0];
  return max(max(max(rest, found[0]), found[1]), max(found[2], found[3]));
}

template <class T>
int32_t first_of(const T* row, int64_t begin, int64_t end, float value) {
  const VecF wanted = broadcast(value);
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    const uint32_t equal = lane_mask(load_some(row + i, kLanes) == wanted);
    if (equal != 0) return int32_t(i + std::countr_zero(equal));
  }
  for (; i < end; ++i) {
    if (load_some(row + i, 1)[0] == value) return int32_t(i);
  }
  return 0;
}

// Only the block of the largest value is read again.
template <class T>
int32_t first_of_largest(const T* row, int64_t width) {
  float best = -std::numeric_limits<float>::infinity();
  int64_t begin = 0;
  for (int64_t i = 0; i < width; i += kBlock) {
    const VecF found = largest_of_block(row + i, std::min(kBlock, width - i));
    if (lane_mask(found > broadcast(best)) == 0) continue;
    best = reduce_max(found);
    begin = i;
  }
  return first_of(row, begin, std::min(begin + kBlock, width), best);
}

}  // namespace

void greedy(const GreedyArgs& args) {
  RBLN_DISPATCH(args.dtype, T, {
    const int threads = team_size(args.rows * args.width, kSerialElements);
    parallel_for(args.rows, 1, threads, [&](int64_t r) {
      const T* row = static_cast<const T*>(args.x) + r * args.x_stride;
      args.out[r] = first_of_largest(row, args.width);
    });
  });
}

}  // namespace rbln
