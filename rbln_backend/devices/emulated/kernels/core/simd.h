// Vectors of float: the one place that knows the instruction set. What differs by it elsewhere
// follows from kLanes and kMultipliesPairs.
//
// GCC vector extensions carry the arithmetic, so the same source gives AVX-512, AVX2, NEON or a
// portable 4-lane build; intrinsics appear only where the extensions have no spelling (FMA, half precision,
// the bf16 dot product). Built with -ffp-contract=off: a product and a sum are fused exactly where
// fma() is written, which is what makes every code path round alike.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "core/types.h"

#if defined(__x86_64__)
// GCC 12 warns of its own _mm512_undefined_ps and the like (bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace rbln {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define RBLN_AVX512 1
inline constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define RBLN_AVX2 1
inline constexpr int kLanes = 8;
#else
#if defined(__aarch64__)
#define RBLN_NEON 1
#endif
inline constexpr int kLanes = 4;
#endif

// True if the CPU multiplies bf16 pairs (dot_pairs) and looks bytes up in tables of 128, as all but
// Cooper Lake do that multiply them.
#if defined(RBLN_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define RBLN_BF16_DOT 1
inline constexpr bool kMultipliesPairs = true;
#else
inline constexpr bool kMultipliesPairs = false;
#endif

// True if it converts half precision.
#if defined(RBLN_AVX512) || defined(__F16C__) || defined(RBLN_NEON)
inline constexpr bool kWidensHalves = true;
#else
inline constexpr bool kWidensHalves = false;
#endif

template <int N>
struct VecTypes {
  typedef float F __attribute__((vector_size(N * 4)));
  typedef int32_t I __attribute__((vector_size(N * 4)));
  typedef uint32_t U __attribute__((vector_size(N * 4)));
  typedef uint16_t H __attribute__((vector_size(N * 2)));
  typedef int16_t S __attribute__((vector_size(N * 2)));
  typedef int8_t B __attribute__((vector_size(N)));
};
using VecF = VecTypes<kLanes>::F;
using VecI = VecTypes<kLanes>::I;
using VecU = VecTypes<kLanes>::U;
using VecH = VecTypes<kLanes>::H;

template <class V>
inline V load_raw(const void* source) {
  V value;
  std::memcpy(&value, source, sizeof(V));
  return value;
}

template <class V>
inline void store_raw(void* target, V value) {
  std::memcpy(target, &value, sizeof(V));
}

// A moment's rest between two looks at what another thread changes.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Fetches a line for writing: no other core keeps it. The compiler's own asks for it where it knows
// that the CPU can, and all can that have AVX2.
inline void prefetch_to_write([[maybe_unused]] const void* address) {
#if defined(RBLN_AVX512) || defined(RBLN_AVX2)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 1);
#endif
}

// Stops the compiler from turning one load into a memory operand of each of its uses: with several
// rows per column that makes a product wait for the load units.
inline void keep_in_register([[maybe_unused]] VecF& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
}

inline void keep_in_register(VecI& value) {
  VecF as_float = (VecF)value;
  keep_in_register(as_float);
  value = (VecI)as_float;
}

inline VecF broadcast(float value) {
  return value - VecF{};
}

inline VecF fma(VecF a, VecF b, VecF c) {
#if defined(RBLN_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(RBLN_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(RBLN_NEON)
  return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Bit by bit, the lanes of a comparison that hold.
inline uint32_t lane_mask(VecI holds) {
#if defined(RBLN_AVX512)
  return uint32_t(_mm512_movepi32_mask((__m512i)holds));
#elif defined(RBLN_AVX2)
  return uint32_t(_mm256_movemask_ps((__m256)holds));
#else
  uint32_t mask = 0;
  for (int lane = 0; lane < kLanes; ++lane) mask |= uint32_t(holds[lane] < 0) << lane;
  return mask;
#endif
}

// The larger one; `b` where either is NaN.
inline VecF max(VecF a, VecF b) {
#if defined(RBLN_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(RBLN_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// The smaller one; `b` where either is NaN.
inline VecF min(VecF a, VecF b) {
#if defined(RBLN_AVX512)
  return _mm512_min_ps(a, b);
#elif defined(RBLN_AVX2)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// A product added in the register of its sum, in the order it is written. Left to itself the
// compiler overwrites a factor it no longer needs, and then moves or spills the sums of a tile that
// fills the registers.
inline VecF accumulate(VecF a, VecF b, VecF sum) {
#if defined(RBLN_AVX2)
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
#else
  return fma(a, b, sum);
#endif
}

// The upper half of every word.
inline VecF high_halves(VecU words) {
  const VecU mask = VecU{} + 0xffff0000u;
#if defined(RBLN_AVX2)
  asm volatile("vpand %1, %0, %0" : "+x"(words) : "xm"(mask));
  return (VecF)words;
#else
  return (VecF)(words & mask);
#endif
}

// The bits of `a` where `mask` has them, else those of `b`.
inline VecU select_bits(uint32_t mask, VecU a, VecU b) {
#if defined(RBLN_AVX512)
  return (VecU)_mm512_ternarylogic_epi32(_mm512_set1_epi32(int(mask)), (__m512i)a, (__m512i)b, 0xca);
#else
  return (a & mask) | (b & ~mask);
#endif
}

inline VecU select_bits(uint32_t mask, VecU a, uint32_t b) { return select_bits(mask, a, VecU{} + b); }

// Byte by byte: what `table` has at an index below 16, and 0 for the index 0x80.
inline VecU look_up(const uint8_t (&table)[16], VecU indices) {
#if defined(RBLN_AVX512)
  const __m512i entries = _mm512_broadcast_i32x4(load_raw<__m128i>(table));
  return (VecU)_mm512_shuffle_epi8(entries, (__m512i)indices);
#elif defined(RBLN_AVX2)
  const __m256i entries = _mm256_broadcastsi128_si256(load_raw<__m128i>(table));
  return (VecU)_mm256_shuffle_epi8(entries, (__m256i)indices);
#elif defined(RBLN_NEON)
  return (VecU)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)indices);
#else
  uint8_t bytes[sizeof(VecU)];
  store_raw(bytes, indices);
  for (uint8_t& byte : bytes) byte = byte < 16 ? table[byte] : 0;
  return load_raw<VecU>(bytes);
#endif
}

#if defined(RBLN_BF16_DOT)
// sum + the products of the bf16 pairs in a and b.
inline VecF dot_pairs(VecF a, VecF b, VecF sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Byte by byte, its lower seven bits the index: even bytes in one table, odd ones in another.
inline VecU look_up_in_turn(const uint8_t (&even)[128], const uint8_t (&odd)[128], VecU indices) {
  constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaaull;
  const auto half = [](const uint8_t* table) { return load_raw<__m512i>(table); };
  const __m512i found = _mm512_mask2_permutex2var_epi8(half(odd), (__m512i)indices, kOdd,
                                                       half(odd + 64));
  return (VecU)_mm512_mask2_permutex2var_epi8(half(even), found, ~kOdd, half(even + 64));
}
#else
VecF dot_pairs(VecF a, VecF b, VecF sum);  // nothing calls it
#endif

// Pairs of 16-bit numbers, multiplied and added to their sum.
inline VecI add_products(VecI a, VecI b, VecI sum) {
#if defined(RBLN_AVX512) && defined(__AVX512VNNI__)
  return (VecI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(RBLN_AVX512)
  // One by one: added up among themselves first, products would take the sums' registers.
  sum = sum + (VecI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
  keep_in_register(sum);
  return sum;
#elif defined(RBLN_AVX2)
  // Added where the sum is, as in accumulate().
  const VecI products = (VecI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  asm volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
  return sum;
#elif defined(__SSE2__)
  return sum + (VecI)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(RBLN_NEON)
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  const int32x4_t high = vmull_high_s16((int16x8_t)a, (int16x8_t)b);
  return sum + (VecI)vpaddq_s32(low, high);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// ---- conversions -------------------------------------------------------------------------------

#if defined(RBLN_AVX512)
inline VecU joined(VecTypes<8>::U first, VecTypes<8>::U second) {
  return (VecU)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
}
#endif

// Signed bytes as words.
template <int N>
inline typename VecTypes<N>::S words_of_bytes(const void* source) {
#if defined(RBLN_AVX512) || defined(RBLN_AVX2)
  // The compiler's own way goes through halves of the vector.
  if constexpr (N == 16)
    return (typename VecTypes<N>::S)_mm256_cvtepi8_epi16(load_raw<__m128i>(source));
#endif
  using V = VecTypes<N>;
  return __builtin_convertvector(load_raw<typename V::B>(source), typename V::S);
}

template <int N>
inline typename VecTypes<N>::F widen(const float* source) {
  return load_raw<typename VecTypes<N>::F>(source);
}

template <int N>
inline typename VecTypes<N>::F widen(const bf16* source) {
  using V = VecTypes<N>;
#if defined(RBLN_AVX512)
  if constexpr (N == 16) {
    const __m512i words = _mm512_cvtepu16_epi32(load_raw<__m256i>(source));
    return (typename V::F)_mm512_slli_epi32(words, 16);
  }
#elif defined(RBLN_AVX2)
  if constexpr (N == 8) {
    const __m256i words = _mm256_cvtepu16_epi32(load_raw<__m128i>(source));
    return (typename V::F)_mm256_slli_epi32(words, 16);
  }
#endif
  const auto words = __builtin_convertvector(load_raw<typename V::H>(source), typename V::U);
  return (typename V::F)(words << 16);
}

template <int N>
inline typename VecTypes<N>::F widen(const f16* source) {
#if defined(RBLN_AVX512)
  if constexpr (N == 16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
#endif
#if defined(__F16C__)
  if constexpr (N == 8) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#endif
#if defined(RBLN_NEON)
  if constexpr (N == 4)
    return (typename VecTypes<N>::F)vcvt_f32_f16(load_raw<float16x4_t>(source));
#endif
  typename VecTypes<N>::F result;
  for (int i = 0; i < N; ++i) result[i] = half_to_float(source[i].bits);
  return result;
}

template <class T>
inline VecF load(const T* source) {
  return widen<kLanes>(source);
}

// Round to nearest even; a NaN stays one.
inline VecU bf16_words(VecF value) {
  const VecU bits = (VecU)value;
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return value != value ? VecU{} + 0x7fc0u : rounded;
}

inline void store(float* target, VecF value) { store_raw(target, value); }

inline void store(bf16* target, VecF value) {
  const VecU words = bf16_words(value);
#if defined(RBLN_AVX2)
  // Packing works within 128-bit halves; the permutation brings both results together.
  const __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);
  const __m256i joined = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128((__m128i*)target, _mm256_castsi256_si128(joined));
#else
  store_raw(target, __builtin_convertvector(words, VecH));
#endif
}

inline void store(f16* target, VecF value) {
#if defined(RBLN_AVX512)
  _mm256_storeu_si256((__m256i*)target, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(RBLN_AVX2)
  _mm_storeu_si128((__m128i*)target, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(RBLN_NEON)
  store_raw(target, vcvt_f16_f32((float32x4_t)value));
#else
  for (int i = 0; i < kLanes; ++i) target[i].bits = float_to_half(value[i]);
#endif
}

// The value as T would hold it.
template <class T>
inline VecF rounded_to(VecF value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    T stored[kLanes];
    store(stored, value);
    return load(stored);
  }
}

template <>
inline VecF rounded_to<bf16>(VecF value) {
  return (VecF)(bf16_words(value) << 16);
}

// The first `count` (1..kLanes) elements; the rest of the vector is zero.
template <class T>
inline VecF load_some(const T* source, int64_t count) {
  if (count >= kLanes) return load(source);
  T whole[kLanes] = {};
  std::memcpy(whole, source, size_t(count) * sizeof(T));
  return load(whole);
}

template <class T>
inline void store_some(T* target, VecF value, int64_t count) {
  if (count >= kLanes) return store(target, value);
  T whole[kLanes];
  store(whole, value);
  std::memcpy(target, whole, size_t(count) * sizeof(T));
}

}  // namespace rbln
