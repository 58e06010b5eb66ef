// What all cores of a machine reach together: `probe fma` in FLOP/s, `probe read BYTES` in bytes/s,
// `probe pairs` in FLOP/s of AVX-512's products of bf16 pairs. OMP_NUM_THREADS chooses the threads.
// Prints one number, 0 where there is no such product.
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float F __attribute__((vector_size(BYTES)));
typedef int64_t I __attribute__((vector_size(BYTES)));

// Independent multiply-adds, more of them than any core has in flight. The empty instruction keeps
// the compiler from finding that two chains are the same.
static float multiply_add(long n) {
  F a = {1}, b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a;
  F x = a * 0 + 0.999f, y = a * 0 + 0.001f;
  while (n--) {
    a = a * x + y; b = b * x + y; c = c * x + y; d = d * x + y; e = e * x + y;
    f = f * x + y; g = g * x + y; h = h * x + y; i = i * x + y; j = j * x + y;
    __asm__("" : "+x"(a), "+x"(b), "+x"(c), "+x"(d), "+x"(e), "+x"(f), "+x"(g), "+x"(h), "+x"(i),
                 "+x"(j));
  }
  a = a + b + c + d + e + f + g + h + i + j;
  return a[0];
}

#if defined(__AVX512BF16__)
enum { PAIR_CHAINS = 16 };
// By the instruction itself: as built-in functions, GCC 12 keeps the sums of so many in memory.
static float multiply_pairs(long n) {
  F a = {1}, b = a, c = a, d = a, e = a, f = a, g = a, h = a;
  F i = a, j = a, k = a, l = a, m = a, o = a, p = a, q = a;
  const F x = a * 0 + 0.999f, y = a * 0 + 0.001f;
#define PAIRS(sum) __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
  while (n--) {
    PAIRS(a) PAIRS(b) PAIRS(c) PAIRS(d) PAIRS(e) PAIRS(f) PAIRS(g) PAIRS(h)
    PAIRS(i) PAIRS(j) PAIRS(k) PAIRS(l) PAIRS(m) PAIRS(o) PAIRS(p) PAIRS(q)
  }
  a = a + b + c + d + e + f + g + h + i + j + k + l + m + o + p + q;
  return a[0];
}
#else
enum { PAIR_CHAINS = 0 };
static float multiply_pairs(long n) { return (float)(n * 0); }
#endif

// The best pass of the last half of 1.2 s: a core that was idle clocks higher for a moment than it
// can while it computes a prompt.
static double chain_rate(float (*multiply)(long), double flops_per_turn) {
  const long n = 1000000;
  const double begin = omp_get_wtime();
  double best = 0;
  while (omp_get_wtime() < begin + 1.2) {
    float sum = 0;
    const double start = omp_get_wtime();
#pragma omp parallel reduction(+ : sum)
    sum += multiply(n);
    const double now = omp_get_wtime();
    const double rate = flops_per_turn * n * omp_get_max_threads() / (now - start);
    if (start > begin + 0.6 && rate > best && sum != 0) best = rate;
  }
  return best;
}

// Fetches 2 KB ahead if `fetches`: which of both is faster depends on the processor.
static int64_t combine(const I* data, size_t count, int fetches) {
  I a = {0}, b = a, c = a, d = a;
  for (size_t i = 0; i + 4 <= count; i += 4) {
    const char* const ahead = (const char*)(data + i) + 2048;
    if (fetches)
      for (int n = 0; n < 4; ++n) __builtin_prefetch(ahead + n * BYTES, 0, 2);
    a |= data[i], b |= data[i + 1], c |= data[i + 2], d |= data[i + 3];
  }
  a |= b | c | d;
  return a[0];
}

// The best pass of 0.8 s over one buffer in huge pages, which every thread reads a run of.
static double read_rate(size_t size) {
  const size_t huge = (size_t)1 << 21, count = size / BYTES;
  I* data = aligned_alloc(huge, (size + huge - 1) / huge * huge);
  if (data == NULL) return 0;
  madvise(data, size, MADV_HUGEPAGE);
  const double begin = omp_get_wtime();
  double best = 0;
  int64_t seen = 0;
  int fetches = 0;
#pragma omp parallel
  {
    const size_t t = omp_get_thread_num(), n = omp_get_num_threads();
    memset(data + count * t / n, 1, (count * (t + 1) / n - count * t / n) * BYTES);
  }
  while (omp_get_wtime() < begin + 0.8 || best == 0) {
    const double start = omp_get_wtime();
#pragma omp parallel reduction(| : seen)
    {
      const size_t t = omp_get_thread_num(), n = omp_get_num_threads();
      seen |= combine(data + count * t / n, count * (t + 1) / n - count * t / n, fetches);
    }
    fetches = !fetches;
    const double rate = size / (omp_get_wtime() - start);
    if (rate > best && seen != 0) best = rate;
  }
  return best;
}

int main(int count, char** words) {
  const size_t size = count == 3 ? strtoull(words[2], NULL, 10) : 0;
  const char* const what = count == 2 || count == 3 ? words[1] : "";
  double rate;
  if (strcmp(what, "read") == 0 && size > 0) rate = read_rate(size);
  else if (strcmp(what, "fma") == 0 && count == 2) rate = chain_rate(multiply_add, 5.0 * BYTES);
  else if (strcmp(what, "pairs") == 0 && count == 2)
    rate = chain_rate(multiply_pairs, 1.0 * BYTES * PAIR_CHAINS);
  else return 2;
  printf("%f\n", rate);
}
