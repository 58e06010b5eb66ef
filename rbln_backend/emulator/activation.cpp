// silu(gate) * up over the two halves of a row.
#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace rbln {
namespace {

constexpr int64_t kChunk = 1024;  // columns per work item, so that one wide row can be shared
constexpr int64_t kSerialElements = 1 << 16;

template <class T>
void run(const SiluArgs& args) {
  const int64_t chunks = (args.width + kChunk - 1) / kChunk;
  const int threads = team_size(args.rows * args.width, kSerialElements);
  parallel_for(args.rows * chunks, 1, threads, [&](int64_t item) {
    const int64_t r = item / chunks;
    const T* gate = static_cast<const T*>(args.x) + r * args.x_stride;
    const T* up = gate + args.width;
    T* out = static_cast<T*>(args.out) + r * args.width;
    const int64_t end = std::min((item % chunks + 1) * kChunk, args.width);
    for (int64_t i = item % chunks * kChunk; i < end; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - i);
      const VecF x = load_some(gate + i, count);
      // With e = exp(-|x|) the sigmoid is 1 / (1 + e), or e / (1 + e) for negative x.
      const VecF e = exp_nonpositive((VecF)((VecU)x | 0x80000000u));
      const VecF silu = (x < 0.0f ? x * e : x) / (e + 1.0f);
      store_some(out + i, silu * load_some(up + i, count), count);
    }
  });
}

}  // namespace

void silu_and_mul(const SiluArgs& args) { RBLN_DISPATCH(args.dtype, T, run<T>(args)); }

}  // namespace rbln
