// The sampling kernels without torch, for a library of each level.
#include "sampling/sampling.h"

extern "C" void draw_rows(const float* x, long rows, long width, const float* temperature,
                          const int* top_k, const float* top_p, const float* min_p,
                          const int64_t* randoms, int* out) {
  rbln::sample({rbln::Dtype::f32, x, rows, width, width, temperature, top_k, top_p, min_p, randoms,
                out});
}

extern "C" void report_rows(const float* x, long rows, long width, const int* tokens, int* ids,
                            float* values, int64_t* ranks) {
  rbln::top_logprobs({rbln::Dtype::f32, x, rows, width, width, tokens, 5, true, ids, values, ranks});
}
