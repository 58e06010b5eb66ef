// New keys and values as a cache of e4m3 keeps them.
#include "attention/attend.h"

namespace rbln {
namespace {

inline constexpr int64_t kSerialNumbers = 1 << 14;  // worth less than waking the team

template <class T>
void run(const E4m3Args& args) {
  const int64_t tokens = args.batch * args.length;
  const int threads = team_size(tokens * args.heads * args.size, kSerialNumbers);
  parallel_for(tokens, kRowsAtOnce, threads, [&](int64_t token) {
    for (int64_t head = 0; head < args.heads; ++head) {
      const T* row = new_row<T>(args.rows, args.stride, token / args.length, head,
                                token % args.length);
      e4m3* out = static_cast<e4m3*>(args.out) + (token * args.heads + head) * args.size;
      for (int64_t d = 0; d < args.size; d += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, args.size - d);
        store_some(out + d, load_some(row + d, count) / args.scale, count);
      }
    }
  });
}

}  // namespace

void to_e4m3(const E4m3Args& args) {
  RBLN_DISPATCH(args.dtype, T, run<T>(args));
}

}  // namespace rbln
