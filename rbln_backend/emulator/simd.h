// Vectors of float: the one place that knows the instruction set.
//
// GCC vector extensions carry the arithmetic, so the same source gives AVX-512, AVX2 or a portable
// 4-lane build; intrinsics appear only where the extensions have no spelling (FMA, half precision,
// the bf16 dot product). Built with -ffp-contract=off: a product and a sum are fused exactly where
// fma() is written, which is what makes every code path round alike.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rbln {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define RBLN_AVX512 1
#define RBLN_HAS_FMA 1
inline constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define RBLN_AVX2 1
#define RBLN_HAS_FMA 1
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

#if defined(RBLN_AVX512) && defined(__AVX512BF16__) && !defined(RBLN_NO_BF16_DOT)
#define RBLN_BF16_DOT 1
#endif

template <int N>
struct VecTypes {
  typedef float F __attribute__((vector_size(N * 4)));
  typedef int32_t I __attribute__((vector_size(N * 4)));
  typedef uint32_t U __attribute__((vector_size(N * 4)));
  typedef uint16_t H __attribute__((vector_size(N * 2)));
};
using VecF = VecTypes<kLanes>::F;
using VecI = VecTypes<kLanes>::I;
using VecU = VecTypes<kLanes>::U;
using VecH = VecTypes<kLanes>::H;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

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

template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// Stops the compiler from turning one load into a memory operand of each of its uses: with several
// rows per column that makes a product wait for the load units.
inline void keep_in_register(VecF& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  (void)value;
#endif
}

inline VecF broadcast(float value) {
  return value - VecF{};
}

inline VecF fma(VecF a, VecF b, VecF c) {
#if defined(RBLN_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(RBLN_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
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

// ---- conversions -------------------------------------------------------------------------------

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude << 13));
  // Half's denormals become normal floats through one exact multiplication.
  const float scaled = bit_cast<float>(magnitude << 13) * bit_cast<float>(0x77800000u);
  return bit_cast<float>(sign | bit_cast<uint32_t>(scaled));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {  // a denormal half: the float addition does the rounding
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return sign | uint16_t(bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | uint16_t(rounded >> 13);
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

// ---- reductions and functions ------------------------------------------------------------------

template <int N, class Combine>
inline float reduce(typename VecTypes<N>::F value, Combine combine) {
  if constexpr (N == 2) {
    return combine(value[0], value[1]);
  } else {
    using Half = typename VecTypes<N / 2>::F;
    Half low, high;
    std::memcpy(&low, &value, sizeof(Half));
    std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof(Half), sizeof(Half));
    return reduce<N / 2>(combine(low, high), combine);
  }
}

inline float reduce_sum(VecF value) {
  return reduce<kLanes>(value, [](auto a, auto b) { return a + b; });
}

inline float reduce_max(VecF value) {
  return reduce<kLanes>(value, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x = fraction * 2^exponent with a whole exponent and a fraction of about 0.7 to 1.4, to about
// 1 ulp for |x| up to 1e6. A NaN stays one in the fraction.
struct Exponential {
  VecF fraction, exponent;
};

inline Exponential exp_parts(VecF x) {
  // The addition rounds to a whole number.
  const VecF magic = broadcast(12582912.0f);
  const VecF n = fma(x, broadcast(1.44269504f), magic) - magic;
  VecF r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  VecF p = broadcast(1.381455966e-3f);
  p = fma(p, r, broadcast(8.368735580e-3f));
  p = fma(p, r, broadcast(4.166838986e-2f));
  p = fma(p, r, broadcast(1.666652048e-1f));
  p = fma(p, r, broadcast(4.999999344e-1f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return {p, n};
}

// 2^n for whole n up to 127; 0 below -126.
inline VecF power_of_two(VecF n) {
  // The addition leaves n + 127, a float's exponent bits, in the low mantissa bits.
  const VecF shifted = max(broadcast(-127.0f), n) + broadcast(12582912.0f + 127.0f);
  return (VecF)((VecI)shifted << 23);
}

// e^x for x <= 0 to about 1 ulp: exactly 1 at 0, NaN for NaN, 1.2e-38 from -87.3 down.
inline VecF exp_nonpositive(VecF x) {
  const Exponential e = exp_parts(max(broadcast(-87.33f), x));
  return e.fraction * power_of_two(e.exponent);
}

// To about 2 ulp; NaN for NaN.
inline VecF tanh(VecF x) {
  const VecF square = x * x;
  VecF p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const VecF near = fma(p * square, x, x);
  const VecU sign = (VecU)x & 0x80000000u;
  const VecF e = exp_nonpositive((VecF)((VecU)(x + x) | 0x80000000u));
  const VecF far = (VecF)((VecU)((1.0f - e) / (1.0f + e)) | sign);
  return square < 0.390625f ? near : far;
}

inline const char* isa_name() {
#if defined(RBLN_BF16_DOT)
  return "avx512_bf16";
#elif defined(RBLN_AVX512)
  return "avx512";
#elif defined(RBLN_AVX2)
  return "avx2";
#else
  return "portable";
#endif
}

}  // namespace rbln
