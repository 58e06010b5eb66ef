// Expansion of a word's fields into factors of a product, by format.
//
// A decoder names kBits and kCount, the fields of a word; kChunk; kOffset, what its numbers are
// stored plus; kUnit, what its numbers are to be multiplied by; and
//
// floats(word, field): that field as float, times place(field).
// pairs(halves, pair): fields `pair` and `pair` + kCount / 2 as unsigned numbers of 16 bits.
#pragma once

#include "core/simd.h"
#include "quantized/quantized.h"

namespace rbln {

typedef uint16_t Halves __attribute__((vector_size(kLanes * 4)));

template <int kBits_, Format kFormat>
struct Fields {
  static constexpr int kBits = kBits_;
  static constexpr int kCount = 32 / kBits;
  static constexpr int64_t kChunk = chunk_of(kFormat);
  static constexpr uint32_t kMask = (1u << kBits) - 1;
};

// A float is made of a field where it lies in its word: masked, and converted to a number too large
// by the power of two of its place. The last field is shifted, not masked.
template <int kBits_>
struct Integers : Fields<kBits_, kBits_ == 4 ? Format::int4 : Format::int8> {
  using F = Fields<kBits_, kBits_ == 4 ? Format::int4 : Format::int8>;
  static constexpr int kOffset = 1 << (kBits_ - 1);
  static constexpr float kUnit = 1.0f;

  static constexpr float place(int field) {
    return field == F::kCount - 1 ? 1.0f : float(1u << (field * kBits_));
  }

  static inline __attribute__((always_inline)) VecF floats(VecU word, int field) {
    const bool is_last = field == F::kCount - 1;
    const VecU bits = is_last ? word >> (field * kBits_) : word & (F::kMask << (field * kBits_));
    return __builtin_convertvector((VecI)bits, VecF);
  }

  static inline __attribute__((always_inline)) VecI pairs(Halves halves, int pair) {
    const Halves shifted = halves >> (pair * kBits_);
    const bool is_last = pair == F::kCount / 2 - 1;
    return (VecI)(is_last ? shifted : shifted & uint16_t(F::kMask));
  }
};

// Twice the value is a whole number, which a table of 16 bytes holds, plus 12.
struct E2m1 : Fields<4, Format::e2m1> {
  static constexpr int kOffset = 12;
  static constexpr float kUnit = 0.5f;
  alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                     12, 11, 10, 9,  8,  6,  4,  0};

  static constexpr float place(int /*field*/) { return 1.0f; }

  static inline __attribute__((always_inline)) VecF floats(VecU word, int field) {
    const VecU index = select_bits(0xfu, word >> (field * kBits), 0x80808000u);
    return __builtin_convertvector((VecI)look_up(kTable, index), VecF);
  }

  static inline __attribute__((always_inline)) VecI pairs(Halves halves, int pair) {
    const VecU shifted = (VecU)(halves >> (pair * kBits));
    return (VecI)look_up(kTable, select_bits(0x000f000fu, shifted, 0x80008000u));
  }
};

}  // namespace rbln
