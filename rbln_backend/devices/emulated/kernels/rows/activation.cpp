// The functions between the two linears of an MLP, with or without a gate, and those of gates and
// routers, rounded once. A value has the same bits wherever in a tensor it stands; ATen's own differ
// between the body of a vector loop and its end.
#include <algorithm>
#include <cmath>

#include "core/functions.h"
#include "core/team.h"
#include "rows/rows.h"

namespace rbln {
namespace {

constexpr int64_t kChunk = 1024;      // columns per work item, so that one wide row can be shared
constexpr int64_t kChunksAtOnce = 4;  // claimed: one alone takes little longer than its claim
constexpr int64_t kSerialElements = 1 << 16;

// x * sigmoid(y) without a cancellation: the sigmoid is 1 / (1 + e) for e = exp(-|y|), or
// e / (1 + e) for negative y.
VecF times_sigmoid(VecF x, VecF y) {
  const VecF e = exp_nonpositive((VecF)((VecU)y | 0x80000000u));
  return (y < 0.0f ? x * e : x) / (e + 1.0f);
}

struct Silu {
  static VecF apply(VecF x) { return times_sigmoid(x, x); }
};

struct QuickGelu {
  static VecF apply(VecF x) { return times_sigmoid(x, x * 1.702f); }
};

// (1 + tanh(y)) / 2 is the sigmoid of 2 y.
struct GeluTanh {
  static VecF apply(VecF x) {
    const VecF inner = fma(x * x, broadcast(0.044715f), broadcast(1.0f));
    return times_sigmoid(x, x * inner * 1.5957691216057308f);
  }
};

// erfc(z) for z >= 0 to a few ulp of it: t exp(p(t) - z^2) with t = 1 / (1 + z / 2), p fitted for
// z <= 9.7, from where on it is 0 in float.
VecF erfc_nonnegative(VecF z) {
  const VecF t = 1.0f / fma(z, broadcast(0.5f), broadcast(1.0f));
  VecF p = broadcast(8.263246715e-2f);
  p = fma(p, t, broadcast(-5.746222138e-1f));
  p = fma(p, t, broadcast(1.515111446f));
  p = fma(p, t, broadcast(-1.827272892f));
  p = fma(p, t, broadcast(8.832947016e-1f));
  p = fma(p, t, broadcast(-2.489525378e-1f));
  p = fma(p, t, broadcast(4.424219429e-1f));
  p = fma(p, t, broadcast(9.925560951e-1f));
  p = fma(p, t, broadcast(-1.265169144f));
  return t * exp_nonpositive(fma(-z, z, p));
}

struct Gelu {
  static VecF apply(VecF x) {
    const VecF magnitude = (VecF)((VecU)x & 0x7fffffffu);
    const VecF tail = erfc_nonnegative(magnitude * 0.70710678f) * 0.5f;
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};

struct ReluSquared {
  static VecF apply(VecF x) {
    const VecF positive = max(VecF{}, x);
    return positive * positive;
  }
};

struct Sigmoid {
  static VecF apply(VecF x) { return times_sigmoid(broadcast(1.0f), x); }
};

// log(1 + exp(x)), which routers take of a few scores: no vector logarithm is worth having for it.
struct Softplus {
  static VecF apply(VecF x) {
    float lanes[kLanes];
    store(lanes, x);
    for (float& lane : lanes)
      lane = (lane > 0.0f ? lane : 0.0f) + std::log1p(std::exp(-std::abs(lane)));
    return load(lanes);
  }
};

template <class T, class Function>
void run(const ActivationArgs& args) {
  const int64_t chunks = (args.width + kChunk - 1) / kChunk;
  const int threads = team_size(args.rows * args.width, kSerialElements);
  parallel_for(args.rows * chunks, kChunksAtOnce, threads, [&](int64_t item) {
    const int64_t r = item / chunks;
    const T* x = static_cast<const T*>(args.x) + r * args.x_stride;
    const T* up = x + args.width;
    T* out = static_cast<T*>(args.out) + r * args.width;
    const int64_t end = std::min((item % chunks + 1) * kChunk, args.width);
    for (int64_t i = item % chunks * kChunk; i < end; i += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - i);
      VecF value = Function::apply(load_some(x + i, count));
      if (args.gated) value = value * load_some(up + i, count);
      store_some(out + i, value, count);
    }
  });
}

template <class T>
void choose(const ActivationArgs& args) {
  switch (args.function) {
    case Activation::silu: return run<T, Silu>(args);
    case Activation::gelu: return run<T, Gelu>(args);
    case Activation::gelu_tanh: return run<T, GeluTanh>(args);
    case Activation::quick_gelu: return run<T, QuickGelu>(args);
    case Activation::relu2: return run<T, ReluSquared>(args);
    case Activation::sigmoid: return run<T, Sigmoid>(args);
    case Activation::softplus: return run<T, Softplus>(args);
  }
}

}  // namespace

void activate(const ActivationArgs& args) { RBLN_DISPATCH(args.dtype, T, choose<T>(args)); }

}  // namespace rbln
