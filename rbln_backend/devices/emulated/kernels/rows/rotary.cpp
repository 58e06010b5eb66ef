// Rotary position embedding of queries and keys in one pass.
#include <algorithm>

#include "core/simd.h"
#include "core/team.h"
#include "rows/rows.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 17;

// Halves rotate against each other: (x[i], x[i + half]).
template <class T>
void rotate_neox(const T* x, const T* cosine, const T* sine, int64_t half, T* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, half - i);
    const VecF a = load_some(x + i, count), b = load_some(x + half + i, count);
    const VecF c = load_some(cosine + i, count), s = load_some(sine + i, count);
    store_some(out + i, a * c - b * s, count);
    store_some(out + half + i, b * c + a * s, count);
  }
}

// Neighbours rotate against each other: (x[2i], x[2i + 1]).
template <class T>
void rotate_pairs(const T* x, const T* cosine, const T* sine, int64_t half, T* out) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, half - i);
    T even[kLanes] = {}, odd[kLanes] = {};
    for (int64_t j = 0; j < count; ++j) {
      even[j] = x[2 * (i + j)];
      odd[j] = x[2 * (i + j) + 1];
    }
    const VecF a = load(even), b = load(odd);
    const VecF c = load_some(cosine + i, count), s = load_some(sine + i, count);
    store(even, a * c - b * s);
    store(odd, b * c + a * s);
    for (int64_t j = 0; j < count; ++j) {
      out[2 * (i + j)] = even[j];
      out[2 * (i + j) + 1] = odd[j];
    }
  }
}

template <class T>
void rotate_row(const RotaryArgs& args, const RotaryArgs::Side& side, int64_t r) {
  const T* cosine = static_cast<const T*>(args.cache) + args.positions[r] * args.cache_stride;
  const int64_t half = args.rotary_dim / 2;
  for (int64_t h = 0; h < side.heads; ++h) {
    const T* x = static_cast<const T*>(side.x) + r * side.stride + h * args.head_size;
    T* out = static_cast<T*>(side.out) + (r * side.heads + h) * args.head_size;
    (args.is_neox ? rotate_neox<T> : rotate_pairs<T>)(x, cosine, cosine + half, half, out);
    std::copy(x + args.rotary_dim, x + args.head_size, out + args.rotary_dim);
  }
}

template <class T>
void run(const RotaryArgs& args) {
  const int64_t heads = args.sides[0].heads + args.sides[1].heads;
  const int threads = team_size(args.rows * heads * args.head_size, kSerialElements);
  parallel_for(args.rows, kRowsAtOnce, threads, [&](int64_t r) {
    for (const auto& side : args.sides) rotate_row<T>(args, side, r);
  });
}

}  // namespace

void rotary_embedding(const RotaryArgs& args) { RBLN_DISPATCH(args.dtype, T, run<T>(args)); }

}  // namespace rbln
