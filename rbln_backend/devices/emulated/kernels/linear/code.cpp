// Packed weights of bf16 into the codes of coded.h, where they lie.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/team.h"
#include "linear/coded.h"

namespace rbln {
namespace {

// A row of pairs: neighbours along the depth for each of a panel's columns.
constexpr int64_t kRow = 2 * kPanel;
using Row = VecTypes<kRow>::H;

constexpr int64_t kSampled = 16;        // of so many steps of a panel one's exponents are counted
constexpr int64_t kWorthListing = 256;  // of so many weights one may be without a code
constexpr int64_t kPanelsAtOnce = 64;

struct Codes {
  uint16_t lowest;  // exponent

  // All bits of a number that has no code, none of the others.
  Row misses(Row numbers) const {
    return (Row)(((numbers >> 7 & 0xff) - lowest) >= uint16_t(kCodes));
  }

  // Sign, 4 bits of zero, code, mantissa.
  Row of(Row numbers) const {
    return (numbers - uint16_t(lowest << 7)) & 0x87ff & ~misses(numbers);
  }

  // One step of a panel, from four rows to three.
  void step(const uint16_t* weights, uint8_t* target) const {
    Row rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = of(load_raw<Row>(weights + i * kRow));
    const Row fourth = rows[3];
    rows[0] |= fourth << 4 & 0x7800;
    rows[1] |= fourth << 8 & 0x7800;
    rows[2] |= (fourth << 12 & 0x7000) | (fourth >> 4 & 0x0800);
    std::memcpy(target, rows, 3 * sizeof(Row));
  }

  float missing(uint16_t number) const {
    return bit_cast<float>(uint32_t(number) << 16) - bit_cast<float>(uint32_t(lowest) << 23);
  }
};

// With the exponents that most weights have.
Codes choose_codes(const uint16_t* weights, int64_t count) {
  constexpr int64_t kStep = Layout<Coded>::kStep * kPanel;
  std::array<int64_t, 256> counts{};
  for (int64_t i = 0; i < count; i += kStep * kSampled)
    for (int64_t j = i; j < i + kStep; ++j) ++counts[weights[j] >> 7 & 0xff];
  int64_t covered = 0, most = -1;
  Codes best{0};
  // The largest exponent is that of infinities.
  for (int end = 0; end < 255; ++end) {
    covered += counts[end] - (end < kCodes ? 0 : counts[end - kCodes]);
    if (end < kCodes - 1 || covered <= most) continue;
    best.lowest = uint16_t(end - kCodes + 1);
    most = covered;
  }
  return best;
}

}  // namespace

bool code_weight(void* packed, int64_t columns, int64_t depth) {
  using Step = Layout<Coded>;
  if (!kReadsCodes || depth % Step::kStep != 0) return false;
  auto* const weights = static_cast<uint16_t*>(packed);
  const int64_t panels = panels_of(columns), size = depth * kPanel, count = panels * size;
  const int64_t steps = depth / Step::kStep;
  const Codes codes = choose_codes(weights, count);
  const int threads = team_size(count, 1 << 17);
  // Calls f(depth, column, number) for what has no code among a panel's numbers.
  const auto each_without = [&](int64_t p, const uint16_t* numbers, auto&& f) {
    for (int64_t i = 0; i < size; i += kRow) {
      const Row misses = codes.misses(load_raw<Row>(numbers + i));
      const auto words = (VecTypes<kPanel>::U)misses;
      uint32_t any = 0;
      for (int64_t w = 0; w < kPanel; ++w) any |= words[w];
      if (any == 0) continue;
      // Beyond the last column there is what fills up the panel.
      for (int64_t j = 0; j < std::min(kRow, 2 * (columns - p * kPanel)); ++j)
        if (misses[j] != 0) f(i / kPanel + j % 2, p * kPanel + j / 2, numbers[i + j]);
    }
  };
  std::vector<int32_t> places(size_t(panels) + 1);
  parallel_for(panels, 1, threads, [&](int64_t p) {
    each_without(p, weights + p * size, [&](auto...) { ++places[p + 1]; });
  });
  std::partial_sum(places.begin(), places.end(), places.begin());
  std::vector<Uncoded> list(static_cast<size_t>(places.back()));
  // Nothing is overwritten before it is known that all of it fits.
  const int64_t listed = places.back(), codes_end = panels * steps * Step::kElements;
  const int64_t end = codes_end + 4 * (panels + 2) + int64_t(sizeof(Uncoded)) * listed;
  if (listed > count / kWorthListing || end > int64_t(sizeof(uint16_t)) * count) return false;
  std::vector<uint16_t> sources(size_t(std::min(panels, kPanelsAtOnce) * size));
  auto* const target = static_cast<uint8_t*>(packed);
  for (int64_t first = 0; first < panels; first += kPanelsAtOnce) {
    const int64_t some = std::min(kPanelsAtOnce, panels - first);
    // The codes of these end before the panels that are read next begin.
    parallel_for(some, 1, threads, [&](int64_t p) {
      std::copy_n(weights + (first + p) * size, size, &sources[p * size]);
    });
    parallel_for(some, 1, threads, [&](int64_t p) {
      const uint16_t* const source = &sources[p * size];
      for (int64_t s = 0; s < steps; ++s)
        codes.step(source + s * 4 * kRow, target + ((first + p) * steps + s) * Step::kElements);
      Uncoded* next = &list[places[first + p]];
      each_without(first + p, source, [&](int64_t t, int64_t column, uint16_t number) {
        *next++ = {int32_t(t), int32_t(column), codes.missing(number)};
      });
    });
  }
  const uint32_t exponent = uint32_t(codes.lowest) << 7, both = exponent << 16 | exponent;
  uint8_t* const behind = target + codes_end;
  std::memcpy(behind, &both, 4);
  std::memcpy(behind + 4, places.data(), 4 * places.size());
  std::memcpy(behind + 4 + 4 * places.size(), list.data(), sizeof(Uncoded) * list.size());
  return true;
}

bool is_coded_weight(const void* packed, int64_t columns, int64_t depth) {
  if (!kReadsCodes || depth % Layout<Coded>::kStep != 0) return false;
  const int64_t panels = panels_of(columns);
  const CodedWeight weight(packed, panels, depth);
  const auto used = reinterpret_cast<const char*>(weight.list) - static_cast<const char*>(packed);
  const int64_t room = (2 * panels * depth * kPanel - used) / int64_t(sizeof(Uncoded));
  if (room < 0 || weight.places[0] != 0) return false;
  for (int64_t p = 0; p < panels; ++p) {
    const int32_t begin = weight.places[p], end = weight.places[p + 1];
    if (begin > end || end > room) return false;
    for (int32_t i = begin; i < end; ++i) {
      const Uncoded& own = weight.list[i];
      if (own.column / kPanel != p || own.column < 0 || own.depth < 0 || own.depth >= depth)
        return false;
    }
  }
  return true;
}

}  // namespace rbln
