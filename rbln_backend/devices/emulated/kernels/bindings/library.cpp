// Functions for the library as a whole, called by Python.
#include "bindings/exports.h"
#include "core/simd.h"
#include "core/team.h"

RBLN_EXPORT const char* rbln_emulator_isa() {
  if (rbln::kMultipliesPairs) return "avx512_bf16";
#if defined(RBLN_NEON)
  return "neon";
#else
  return rbln::kLanes == 16 ? "avx512" : rbln::kLanes == 8 ? "avx2" : "portable";
#endif
}

RBLN_EXPORT void rbln_emulator_set_threads(int threads) { rbln::set_team_threads(threads); }
