// The tiles of AMX: eight registers of up to 16 rows of 64 bytes, and products of bf16 pairs and of
// bytes between them. As simd.h is for vectors, this is the one place that knows the instructions.
//
// The build says whether there are any: RBLN_AMX for the instructions, which need Linux's permission
// (targets.py asks for it), RBLN_AMX_EMULATED for the same in plain C++, which only tests use.
//
// The instruction defines the rounding of bf16 products (Intel's manual, TDPBF16PS): per
// element of C two sums begin at zero, one over the even and one over the odd depths, each step fused
// and rounded to nearest even; both are added, and the result to C. Denormals count as zero, in and
// out. Storing C and going on from it changes no bit. Products of bytes are exact.
#pragma once

#include <cstdint>
#include <utility>

#include "core/simd.h"

#if defined(RBLN_AMX_EMULATED)
#include <cstdio>
#include <cstdlib>
#endif

namespace rbln {

#if defined(RBLN_AMX) || defined(RBLN_AMX_EMULATED)
#define RBLN_TILES 1
inline constexpr bool kMultipliesTiles = true;
#else
inline constexpr bool kMultipliesTiles = false;
#endif

namespace amx {

inline constexpr int kTiles = 8;
inline constexpr int kRows = 16;       // of a whole tile
inline constexpr int kRowBytes = 64;
inline constexpr int kDepth = 32;      // depths of one product of bf16
inline constexpr int kColumns = 16;    // of B and C; B has a row per pair of depths

#if defined(RBLN_TILES)

// f.template operator()<I>() for I from 0 to N - 1: instructions name tiles by constants.
template <int N, class F>
inline __attribute__((always_inline)) void unroll(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f.template operator()<I>(), ...);
  }(std::make_integer_sequence<int, N>{});
}

// Operand of LDTILECFG.
struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void give(int tile, int count) {
    rows[tile] = uint8_t(count);
    row_bytes[tile] = count > 0 ? kRowBytes : 0;
  }
};
static_assert(sizeof(Configuration) == 64);

#if defined(RBLN_AMX_EMULATED)

#if !defined(RBLN_AVX512) && !defined(RBLN_AVX2)
#error "the emulation of AMX needs fused multiply-adds"
#endif

struct Emulated {
  Configuration shape;
  bool is_configured = false;
  alignas(64) uint8_t tiles[kTiles][kRows][kRowBytes];
};
inline thread_local Emulated emulated;

// A processor raises an exception there.
inline void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline int rows_of(int tile) {
  demand(emulated.is_configured && emulated.shape.rows[tile] > 0, "a tile is not configured");
  return emulated.shape.rows[tile];
}

inline void configure(const Configuration& shape) {
  std::memset(emulated.tiles, 0, sizeof(emulated.tiles));
  emulated.shape = shape;
  emulated.is_configured = true;
}

inline void release() { emulated.is_configured = false; }

template <int T>
inline void zero() {
  rows_of(T);
  std::memset(emulated.tiles[T], 0, sizeof(emulated.tiles[T]));
}

template <int T>
inline void load(const void* from, int64_t stride) {
  zero<T>();
  for (int r = 0; r < rows_of(T); ++r)
    std::memcpy(emulated.tiles[T][r], static_cast<const char*>(from) + r * stride, kRowBytes);
}

template <int T>
inline void store(void* to, int64_t stride) {
  for (int r = 0; r < rows_of(T); ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, emulated.tiles[T][r], kRowBytes);
}

__attribute__((noinline)) inline void multiply_rows_of_tiles(int c, int a, int b) {
  for (int r = 0; r < rows_of(c); ++r) {
    for (int v = 0; v < kPanel / kLanes; ++v) {
      VecF even{}, odd{};
      for (int pair = 0; pair < kRows; ++pair) {
        const auto word = load_raw<uint32_t>(emulated.tiles[a][r] + pair * 4);
        const auto words = load_raw<VecU>(emulated.tiles[b][pair] + v * kLanes * 4);
        even = fma(broadcast(bit_cast<float>(word << 16)), (VecF)(words << 16), even);
        odd = fma(broadcast(bit_cast<float>(word & 0xffff0000u)), (VecF)(words & 0xffff0000u), odd);
      }
      uint8_t* sum = emulated.tiles[c][r] + v * kLanes * 4;
      store_raw(sum, load_raw<VecF>(sum) + (even + odd));
    }
  }
}

template <int C, int A, int B>
inline void multiply() {
  static_assert(C != A && C != B && A != B);
  demand(rows_of(C) == rows_of(A) && rows_of(B) == kRows, "tiles of a product do not fit");
  // Flush to zero, denormals are zero, and no exception reported. The arithmetic is a function of
  // its own so that it stays between the two.
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  multiply_rows_of_tiles(C, A, B);
  _mm_setcsr(before);
}

template <class OfA>
void multiply_bytes(int c, int a, int b) {
  demand(rows_of(c) == rows_of(a) && rows_of(b) == kRows, "tiles of a product do not fit");
  for (int r = 0; r < rows_of(c); ++r)
    for (int column = 0; column < kColumns; ++column) {
      uint8_t* sum = emulated.tiles[c][r] + column * 4;
      auto total = load_raw<uint32_t>(sum);
      for (int t = 0; t < kRowBytes; ++t)
        total += uint32_t(int32_t(OfA(emulated.tiles[a][r][t])) *
                          int32_t(emulated.tiles[b][t / 4][column * 4 + t % 4]));
      store_raw(sum, total);
    }
}

template <int C, int A, int B>
inline void multiply_signed() {
  static_assert(C != A && C != B && A != B);
  multiply_bytes<int8_t>(C, A, B);
}

template <int C, int A, int B>
inline void multiply_unsigned() {
  static_assert(C != A && C != B && A != B);
  multiply_bytes<uint8_t>(C, A, B);
}

#else

inline void configure(const Configuration& shape) { asm volatile("ldtilecfg %0" ::"m"(shape)); }

inline void release() { asm volatile("tilerelease"); }

template <int T>
inline __attribute__((always_inline)) void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
inline __attribute__((always_inline)) void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline __attribute__((always_inline)) void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

template <int C, int A, int B>
inline __attribute__((always_inline)) void multiply() {
  static_assert(C != A && C != B && A != B);
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// C, of int32, += products of bytes, signed ones of A and unsigned ones of B; four depths in a word.
template <int C, int A, int B>
inline __attribute__((always_inline)) void multiply_signed() {
  static_assert(C != A && C != B && A != B);
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// The same with unsigned ones of A.
template <int C, int A, int B>
inline __attribute__((always_inline)) void multiply_unsigned() {
  static_assert(C != A && C != B && A != B);
  asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

// Up to 32 rows of A against two panels of B, or up to 16 against four: four tiles of C, two of A,
// two of B. With up to 16 rows all tiles but B's have the same shape. The thread has them while this
// lives: tiles that are not released are saved at every switch to another thread.
class Block {
 public:
  Block() = default;
  Block(const Block&) = delete;
  ~Block() {
    if (rows_ != 0) release();
  }

  // Gives the tiles the shapes for `rows`; their contents are lost.
  void shape(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const int upper = rows < kRows ? rows : kRows, lower = rows - upper;
    Configuration to;
    for (int c = 0; c < 4; ++c) to.give(c, lower > 0 && c >= 2 ? lower : upper);
    to.give(4, upper);
    to.give(5, lower > 0 ? lower : upper);
    to.give(6, kRows);
    to.give(7, kRows);
    configure(to);
  }

 private:
  int rows_ = 0;
};

#endif

}  // namespace amx
}  // namespace rbln
