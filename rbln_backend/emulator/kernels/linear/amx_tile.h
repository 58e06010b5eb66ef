// Shared parts of bf16 products by tiles: activations as A's tiles, and the inner loop.
#pragma once

#include "core/amx.h"

#if defined(RBLN_TILES)

#include <algorithm>

#include "linear/linear.h"

namespace rbln {

inline constexpr int64_t kGroupRows = 2 * amx::kRows;
inline constexpr int64_t kTileBytes = amx::kRows * amx::kRowBytes;

// Activations in the order of A's tiles: per group of rows [steps][rows of the group][32 depths].
struct TileActivations {
  int64_t rows, steps;
  bf16* data;

  int64_t groups() const { return (rows + kGroupRows - 1) / kGroupRows; }
  int size(int64_t g) const { return int(std::min(kGroupRows, rows - g * kGroupRows)); }
  bf16* group(int64_t g, int64_t step) const {
    return data + (g * kGroupRows * steps + step * size(g)) * amx::kDepth;
  }
};

inline void arrange_group(const LinearArgs& args, const TileActivations& to, int64_t g) {
  for (int r = 0; r < to.size(g); ++r) {
    const bf16* row = static_cast<const bf16*>(args.x) + (g * kGroupRows + r) * args.x_stride;
    for (int64_t step = 0; step < to.steps; ++step) {
      const int64_t first = step * amx::kDepth;
      const int64_t count = std::min<int64_t>(amx::kDepth, args.depth - first);
      bf16* target = to.group(g, step) + r * amx::kDepth;
      std::copy_n(row + first, count, target);
      std::fill(target + count, target + amx::kDepth, bf16{0});
    }
  }
}

// Prefetch during a group's product: `bytes` per step of each panel, whole lines.
template <int P>
struct Fetch {
  const char* address[P];
  int64_t bytes;
};

// sums[r][p * 16 + c] += the products of `steps` steps: R tiles of rows and P panels.
template <int R, int P>
void multiply_steps(const bf16* a, int rows, const bf16* const (&panels)[P], int64_t steps,
                    const Fetch<P>& fetch) {
  static_assert(R * P == 4);
  for (int64_t s = 0; s < steps; ++s) {
    const bf16* rows_at = a + s * rows * amx::kDepth;
    amx::unroll<R>([&]<int r>() __attribute__((always_inline)) {
      amx::load<4 + r>(rows_at + r * amx::kRows * amx::kDepth, amx::kRowBytes);
    });
    amx::unroll<P>([&]<int p>() __attribute__((always_inline)) {
      constexpr int b = 6 + p % 2;
      for (int64_t line = 0; line < fetch.bytes; line += 64)
        __builtin_prefetch(fetch.address[p] + s * fetch.bytes + line);
      amx::load<b>(panels[p] + s * kTileBytes / int64_t(sizeof(bf16)), amx::kRowBytes);
      amx::unroll<R>([&]<int r>() __attribute__((always_inline)) {
        amx::multiply<r * P + p, 4 + r, b>();
      });
    });
  }
}

}  // namespace rbln

#endif
