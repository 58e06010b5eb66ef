// Mixture of experts: where each row goes, and the gated layers of the experts that were chosen.
//
// Experts run one after the other, each over the rows that chose it, so that only the weights of
// chosen experts are read, and once. A row's outputs are added up in float32 in the order of its
// experts' numbers, whatever other rows there are: with the linear kernel's, that is the batch
// invariance of the whole.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/functions.h"
#include "core/team.h"
#include "lora/lora.h"
#include "moe/moe.h"
#include "rows/rows.h"

namespace rbln {
namespace {

constexpr int64_t kSerialElements = 1 << 16;
constexpr float kSwigluAlpha = 1.702f;
constexpr float kSwigluLimit = 7.0f;

// The largest scores first, the lower number first among equals; NaN gives valid numbers, too.
void choose(const float* scores, int64_t experts, int64_t top_k, float* values, int32_t* ids) {
  int64_t filled = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (filled == top_k && !(scores[e] > values[top_k - 1])) continue;
    int64_t place = filled < top_k ? filled++ : top_k - 1;
    for (; place > 0 && scores[e] > values[place - 1]; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = scores[e];
    ids[place] = int32_t(e);
  }
}

template <class T>
void route_row(const RouteArgs& args, int64_t r) {
  thread_local std::vector<float> scores;
  scores.resize(size_t(args.experts + kLanes));
  const T* logits = static_cast<const T*>(args.logits) + r * args.stride;
  for (int64_t e = 0; e < args.experts; e += kLanes)
    store(&scores[e], load_some(logits + e, std::min<int64_t>(kLanes, args.experts - e)));
  float* weights = args.weights + r * args.top_k;
  choose(scores.data(), args.experts, args.top_k, weights, args.ids + r * args.top_k);
  const float best = weights[0];
  float total = 0.0f;
  const float* summed = args.renormalize ? weights : scores.data();
  const int64_t count = args.renormalize ? args.top_k : args.experts;
  for (int64_t i = 0; i < count; ++i) total += std::exp(summed[i] - best);
  for (int64_t k = 0; k < args.top_k; ++k) weights[k] = std::exp(weights[k] - best) / total;
  int32_t* ids = args.ids + r * args.top_k;
  const bool is_padding = args.tokens_mask != nullptr && args.tokens_mask[r] == 0.0f;
  for (int64_t k = 0; k < args.top_k; ++k) {
    if (is_padding) ids[k] = -1;
    else if (args.expert_map != nullptr) ids[k] = args.expert_map[ids[k]];
  }
}

// gate * sigmoid(alpha * gate) * (up + 1) over pairs of (gate, up), both limited.
template <class T>
void swiglu_oai(const T* x, int64_t rows, int64_t width, T* out) {
  parallel_for(rows, kRowsAtOnce, team_size(rows * width, kSerialElements), [&](int64_t r) {
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, width - i);
      const T* pairs = x + 2 * (r * width + i);
      float words[2 * kLanes] = {}, gates[kLanes], ups[kLanes];
      store(words, load_some(pairs, std::min<int64_t>(kLanes, 2 * count)));
      if (2 * count > kLanes) store(words + kLanes, load_some(pairs + kLanes, 2 * count - kLanes));
      for (int c = 0; c < kLanes; ++c) {
        gates[c] = words[2 * c];
        ups[c] = words[2 * c + 1];
      }
      VecF gate = load(gates), up = load(ups);
      gate = gate > kSwigluLimit ? broadcast(kSwigluLimit) : gate;
      up = up > kSwigluLimit ? broadcast(kSwigluLimit) : up;
      up = up < -kSwigluLimit ? broadcast(-kSwigluLimit) : up;
      // With e = exp(-|x|) the sigmoid is 1 / (1 + e), or e / (1 + e) for negative x.
      const VecF scaled = gate * kSwigluAlpha;
      const VecF e = exp_nonpositive((VecF)((VecU)scaled | 0x80000000u));
      const VecF glu = (scaled < 0.0f ? gate * e : gate) / (e + 1.0f);
      store_some(out + r * width + i, (up + 1.0f) * glu, count);
    }
  });
}

// Which (row, slot) pairs chose each expert: the pairs of expert e are at [begin[e], begin[e + 1]).
// A pair's number is also the place of its weight.
struct Choices {
  std::vector<int64_t> begin, pairs;

  explicit Choices(int64_t experts) : begin(size_t(experts + 1), 0) {}

  static Choices of_ids(const MoeArgs& args) {
    Choices made(args.experts);
    const int64_t count = args.rows * args.top_k;
    for (int64_t p = 0; p < count; ++p)
      if (args.ids[p] >= 0) ++made.begin[args.ids[p] + 1];
    for (int64_t e = 0; e < args.experts; ++e) made.begin[e + 1] += made.begin[e];
    made.pairs.resize(size_t(made.begin[args.experts]));
    std::vector<int64_t> next = made.begin;
    for (int64_t p = 0; p < count; ++p)
      if (args.ids[p] >= 0) made.pairs[next[args.ids[p]]++] = p;
    return made;
  }

  static Choices of_weights(const MoeArgs& args, const int32_t* counts) {
    Choices made(args.experts);
    for (int64_t e = 0; e < args.experts; ++e) {
      for (int64_t r = 0; counts[e] > 0 && r < args.rows; ++r)
        if (args.weights[r * args.experts + e] != 0.0f) made.pairs.push_back(r * args.experts + e);
      made.begin[e + 1] = int64_t(made.pairs.size());
    }
    return made;
  }
};

void check_ids(const MoeArgs& args) {
  for (int64_t p = 0; p < args.rows * args.top_k; ++p) {
    const int32_t id = args.ids[p], *row = args.ids + p / args.top_k * args.top_k;
    const std::string place = "ids[" + std::to_string(p / args.top_k) + "] names expert ";
    if (id < -1 || id >= args.experts)
      throw std::out_of_range(place + std::to_string(id) + " of " + std::to_string(args.experts));
    if (id >= 0 && std::find(row, args.ids + p, id) != args.ids + p)
      throw std::invalid_argument(place + std::to_string(id) + " twice");
  }
}

// Buffers of one expert, row by row; reused between calls.
template <class T>
struct Scratch {
  std::vector<T> gathered, gate_up, hidden, output;
  std::vector<float> total;
  std::vector<int32_t> slots;
};

template <class V>
V* at_least(std::vector<V>& buffer, int64_t count) {
  if (int64_t(buffer.size()) < count) buffer.resize(size_t(count));
  return buffer.data();
}

template <class T>
const T* of_expert(const void* stacked, int64_t elements, int64_t e) {
  return stacked == nullptr ? nullptr : static_cast<const T*>(stacked) + e * elements;
}

// One expert's product; `weight` is the first expert's, if there is one.
void multiply(const LinearArgs& plain, QuantizedWeight weight, int64_t e) {
  if (weight.words == nullptr) return linear(plain);
  const int64_t columns = panels_of(plain.columns) * kPanel;
  const int64_t scales = e * columns * (plain.depth / weight.group);
  const int64_t scale_bytes = weight.format == Format::e2m1        ? 1
                              : weight.scale_dtype == Dtype::f32 ? 4
                                                                 : 2;
  weight.words += e * columns * (plain.depth * bits_of(weight.format) / 32);
  weight.scales = static_cast<const char*>(weight.scales) + scales * scale_bytes;
  if (weight.zeros != nullptr) weight.zeros += scales;
  quantized_linear({plain, weight});
}

// The adapters' slots of the rows behind `pairs`; null if none of them has one.
const int32_t* slots_of(const MoeArgs& args, const int64_t* pairs, int64_t rows,
                        std::vector<int32_t>& memory) {
  const ExpertAdapters& adapters = args.adapters;
  if (adapters.slots == nullptr) return nullptr;
  const int64_t length = args.rows / adapters.requests;
  int32_t* slots = at_least(memory, rows);
  for (int64_t i = 0; i < rows; ++i) slots[i] = adapters.slots[pairs[i] / args.top_k / length];
  return std::any_of(slots, slots + rows, [](int32_t slot) { return slot >= 0; }) ? slots : nullptr;
}

// Adds to y [rows, columns] what one expert's adapters make of x [rows, depth].
template <class T>
void add_adapters(const MoeArgs& layer, const ExpertLora& lora, int64_t e, const int32_t* slots,
                  const T* x, int64_t rows, int64_t depth, T* y, int64_t columns) {
  if (slots == nullptr) return;
  const ExpertAdapters& adapters = layer.adapters;
  const int64_t slices = lora.b[1] == nullptr ? 1 : 2, first = e * adapters.slot_count;
  LoraArgs args{};
  args.dtype = layer.dtype;
  args.x = x;
  args.rows = args.requests = rows;
  args.depth = args.x_stride = depth;
  args.slots = slots;
  args.slot_count = adapters.slot_count;
  args.a = static_cast<const T*>(lora.a) + first * lora.a_elements;
  args.a_elements = lora.a_elements;
  args.rank = adapters.rank;
  for (int64_t s = 0; s < slices; ++s)
    args.slices.push_back({static_cast<const T*>(lora.b[s]) + first * lora.b_elements,
                           lora.b_elements, columns / slices});
  args.y = y;
  add_lora(args);
}

// Adds one expert's weighted outputs to the totals of the rows behind `pairs`.
template <class T>
void run_expert(const MoeArgs& args, int64_t e, const int64_t* pairs, int64_t rows,
                Scratch<T>& scratch, float* total) {
  const int64_t width = args.hidden_size, inner = args.intermediate_size;
  T* gathered = at_least(scratch.gathered, rows * width);
  T* gate_up = at_least(scratch.gate_up, rows * 2 * inner);
  T* hidden = at_least(scratch.hidden, rows * inner);
  T* output = at_least(scratch.output, rows * width);
  for (int64_t i = 0; i < rows; ++i)
    std::copy_n(static_cast<const T*>(args.x) + pairs[i] / args.top_k * args.x_stride, width,
                gathered + i * width);
  multiply({args.dtype, gathered, rows, width, width, of_expert<T>(args.w13, args.w13_elements, e),
            of_expert<T>(args.w13_bias, 2 * inner, e), 2 * inner, gate_up},
           args.quantized_w13, e);
  const int32_t* slots = slots_of(args, pairs, rows, scratch.slots);
  add_adapters(args, args.adapters.first, e, slots, gathered, rows, width, gate_up, 2 * inner);
  if (args.interleaved) {
    swiglu_oai(gate_up, rows, inner, hidden);
  } else {
    activate({args.dtype, Activation::silu, true, gate_up, rows, inner, 2 * inner, hidden});
  }
  multiply({args.dtype, hidden, rows, inner, inner, of_expert<T>(args.w2, args.w2_elements, e),
            of_expert<T>(args.w2_bias, width, e), width, output},
           args.quantized_w2, e);
  add_adapters(args, args.adapters.second, e, slots, hidden, rows, inner, output, width);
  const int threads = team_size(rows * width, kSerialElements);
  parallel_for(rows, kRowsAtOnce, threads, [&](int64_t i) {
    const VecF weight = broadcast(args.weights[pairs[i]]);
    float* sum = total + pairs[i] / args.top_k * width;
    for (int64_t c = 0; c < width; c += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, width - c);
      const VecF value = load_some(output + i * width + c, count);
      store_some(sum + c, fma(weight, value, load_some(sum + c, count)), count);
    }
  });
}

template <class T>
void run(const MoeArgs& args, const Choices& choices) {
  thread_local Scratch<T> scratch;
  const int64_t elements = args.rows * args.hidden_size;
  float* total = at_least(scratch.total, elements);
  std::fill_n(total, elements, 0.0f);
  for (int64_t e = 0; e < args.experts; ++e) {
    const int64_t rows = choices.begin[e + 1] - choices.begin[e];
    if (rows > 0) run_expert(args, e, &choices.pairs[choices.begin[e]], rows, scratch, total);
  }
  for (int64_t i = 0; i < elements; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, elements - i);
    store_some(static_cast<T*>(args.out) + i, load_some(total + i, count), count);
  }
}

}  // namespace

void moe_route(const RouteArgs& args) {
  const int threads = team_size(args.rows * args.experts, kSerialElements);
  RBLN_DISPATCH(args.dtype, T, {
    parallel_for(args.rows, kRowsAtOnce, threads, [&](int64_t r) { route_row<T>(args, r); });
  });
}

void moe(const MoeArgs& args) {
  check_ids(args);
  const Choices choices = Choices::of_ids(args);
  RBLN_DISPATCH(args.dtype, T, run<T>(args, choices));
}

void moe_masked(const MoeArgs& args, const int32_t* counts) {
  const Choices choices = Choices::of_weights(args, counts);
  MoeArgs by_expert = args;
  by_expert.top_k = args.experts;
  RBLN_DISPATCH(args.dtype, T, run<T>(by_expert, choices));
}

}  // namespace rbln
