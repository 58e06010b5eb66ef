// Half precision, one number at a time: for CPUs and vector widths without an instruction for it.
#pragma once

#include <cstdint>
#include <cstring>

namespace rbln {

template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

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

}  // namespace rbln
