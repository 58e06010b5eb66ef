// Scores of a row from its logits.
#pragma once

#include <vector>

#include "core/functions.h"
#include "sampling/weights.h"

namespace rbln {

// Writes the quotients to `to`, padded to whole panels; the largest one is returned, never a NaN.
template <class T>
float divide(const T* row, int64_t width, float temperature, float* to) {
  const VecF lowest = broadcast(kLowest);
  VecF found = lowest;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const VecF score = load(row + i) / temperature;
    found = max(score, found);
    store(to + i, score);
  }
  for (int64_t end = (width + kPanel - 1) / kPanel * kPanel; i < end; i += kLanes) store(to + i, lowest);
  float largest = reduce_max(found);
  for (i = width / kLanes * kLanes; i < width; ++i) {
    to[i] = load_some(row + i, 1)[0] / temperature;
    if (to[i] > largest) largest = to[i];
  }
  return largest;
}

// In memory of the thread, which its next call takes over.
template <class T>
Scores scores_of(const T* row, int64_t width, float temperature) {
  thread_local std::vector<float> values;
  const int64_t padded = (width + kPanel - 1) / kPanel * kPanel;
  if (int64_t(values.size()) < padded) values.resize(size_t(padded));
  const float largest = divide(row, width, temperature, values.data());
  return {values.data(), padded, largest};
}

}  // namespace rbln
