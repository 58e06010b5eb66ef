// AVX-512 for CPUs without it: the few intrinsics that the kernels use, computed lane by lane.
//
// Given to the compiler by -include, with -DSTAND_IN_BF16 for a CPU that has AVX512-BF16, too. The
// kernels then take the branches that they take on such a CPU; GCC cuts 64-byte vectors in two.
// The meanings are those of Intel's manual.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Before the feature macros are set: the real header is made for the real target.
#include <immintrin.h>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#ifdef STAND_IN_BF16
#define __AVX512BF16__ 1
#define __AVX512VBMI__ 1
#endif

// The kernels' asm statements without code, which pin a value to a register: there is none that
// holds 64 bytes.
#define asm(...)

namespace stand_in {

template <class F>
inline __m512 each_lane(F f) {
  __m512 result;
  for (int i = 0; i < 16; ++i) result[i] = f(i);
  return result;
}

inline __m512 fmadd(__m512 a, __m512 b, __m512 c) {
  return each_lane([&](int i) { return __builtin_fmaf(a[i], b[i], c[i]); });
}

// The second one where either is NaN.
inline __m512 max(__m512 a, __m512 b) {
  return each_lane([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}

inline __m512 min(__m512 a, __m512 b) {
  return each_lane([&](int i) { return a[i] < b[i] ? a[i] : b[i]; });
}

typedef uint16_t Words __attribute__((vector_size(32)));
typedef uint32_t Doubles __attribute__((vector_size(64)));

inline __m512i widen_words(__m256i words) {
  return (__m512i)__builtin_convertvector((Words)words, Doubles);
}

inline __m512i shift_left(__m512i values, unsigned count) {
  return (__m512i)((Doubles)values << count);
}

inline __m512i multiply_words(__m512i a, __m512i b) {
  typedef int32_t Signed __attribute__((vector_size(64)));
  const Signed left = (Signed)a, right = (Signed)b;
  return (__m512i)((left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16));
}

inline __m512 from_half(__m256i halves) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  __m512 result;
  std::memcpy(&result, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&result) + 32, &high, 32);
  return result;
}

template <int kRounding>
inline __m256i to_half(__m512 value) {
  __m256 low, high;
  std::memcpy(&low, &value, 32);
  std::memcpy(&high, reinterpret_cast<const char*>(&value) + 32, 32);
  return _mm256_set_m128i(_mm256_cvtps_ph(high, kRounding), _mm256_cvtps_ph(low, kRounding));
}

// A denormal counts as zero, in and out, whatever the control register says.
inline float flushed(float value) {
  return std::fabs(value) < 1.17549435e-38f ? std::copysign(0.0f, value) : value;
}

inline float from_bf16(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}

// Per lane the upper pair's product is added first, then the lower pair's, each rounded once.
inline __m512 dot_pairs(__m512 sums, __m512bh a, __m512bh b) {
  uint32_t of_a[16], of_b[16];
  std::memcpy(of_a, &a, 64);
  std::memcpy(of_b, &b, 64);
  return each_lane([&](int i) {
    const float upper = __builtin_fmaf(from_bf16(of_a[i] & 0xffff0000u),
                                       from_bf16(of_b[i] & 0xffff0000u), flushed(sums[i]));
    return flushed(
        __builtin_fmaf(from_bf16(of_a[i] << 16), from_bf16(of_b[i] << 16), flushed(upper)));
  });
}

// Each bit picks its result from the eight of `table`.
template <int table>
inline __m512i combine(__m512i a, __m512i b, __m512i c) {
  uint64_t of_a[8], of_b[8], of_c[8], result[8] = {};
  std::memcpy(of_a, &a, 64);
  std::memcpy(of_b, &b, 64);
  std::memcpy(of_c, &c, 64);
  for (int i = 0; i < 8; ++i)
    for (int bit = 0; bit < 64; ++bit) {
      const int index =
          int((of_a[i] >> bit & 1) << 2 | (of_b[i] >> bit & 1) << 1 | (of_c[i] >> bit & 1));
      result[i] |= uint64_t(table >> index & 1) << bit;
    }
  __m512i whole;
  std::memcpy(&whole, result, 64);
  return whole;
}

inline __m512i lower_half(__m256i half) {
  __m512i whole{};
  std::memcpy(&whole, &half, 32);
  return whole;
}

template <int place>
inline __m512i with_half(__m512i whole, __m256i half) {
  std::memcpy(reinterpret_cast<char*>(&whole) + 32 * place, &half, 32);
  return whole;
}

inline __m512i repeat(__m128i quarter) {
  __m512i whole;
  for (int i = 0; i < 4; ++i) std::memcpy(reinterpret_cast<char*>(&whole) + 16 * i, &quarter, 16);
  return whole;
}

inline uint16_t signs(__m512i lanes) {
  int32_t words[16];
  std::memcpy(words, &lanes, 64);
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= uint16_t(words[i] < 0) << i;
  return mask;
}

// Within each quarter; an index with its highest bit set gives zero.
inline __m512i shuffle_bytes(__m512i entries, __m512i indices) {
  uint8_t of_entries[64], of_indices[64], result[64];
  std::memcpy(of_entries, &entries, 64);
  std::memcpy(of_indices, &indices, 64);
  for (int i = 0; i < 64; ++i)
    result[i] = of_indices[i] & 0x80 ? 0 : of_entries[i / 16 * 16 + (of_indices[i] & 15)];
  __m512i whole;
  std::memcpy(&whole, result, 64);
  return whole;
}

// Where the mask has a bit, what the two tables have at the index' lower seven bits, else the index.
inline __m512i look_up_bytes(__m512i first, __m512i indices, uint64_t mask, __m512i second) {
  uint8_t table[128], bytes[64];
  std::memcpy(table, &first, 64);
  std::memcpy(table + 64, &second, 64);
  std::memcpy(bytes, &indices, 64);
  for (int i = 0; i < 64; ++i)
    if (mask >> i & 1) bytes[i] = table[bytes[i] & 127];
  __m512i whole;
  std::memcpy(&whole, bytes, 64);
  return whole;
}

}  // namespace stand_in

#define _mm512_fmadd_ps stand_in::fmadd
#define _mm512_max_ps stand_in::max
#define _mm512_min_ps stand_in::min
#define _mm512_cvtepu16_epi32 stand_in::widen_words
#define _mm512_slli_epi32 stand_in::shift_left
#define _mm512_cvtph_ps stand_in::from_half
#define _mm512_madd_epi16 stand_in::multiply_words
#define _mm512_set1_epi32(value) ((__m512i)(VecU{} + uint32_t(value)))
#define _mm512_castsi256_si512 stand_in::lower_half
#undef _mm512_inserti64x4
#define _mm512_inserti64x4(whole, half, place) stand_in::with_half<place>(whole, half)
#define _mm512_movepi32_mask stand_in::signs
#define _mm512_broadcast_i32x4 stand_in::repeat
#define _mm512_shuffle_epi8 stand_in::shuffle_bytes
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32(a, b, c, table) stand_in::combine<table>(a, b, c)
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(value, rounding) stand_in::to_half<rounding>(value)
#define _mm512_dpbf16_ps stand_in::dot_pairs
#define _mm512_mask2_permutex2var_epi8 stand_in::look_up_bytes
