// Functions for the library as a whole, called by Python.
#include "bindings/exports.h"
#include "core/amx.h"
#include "core/simd.h"
#include "core/team.h"

RBLN_EXPORT const char* rbln_emulator_isa() {
  return rbln::kMultipliesTiles ? "amx_bf16" : rbln::isa_name();
}

RBLN_EXPORT void rbln_emulator_set_threads(int threads) { rbln::set_team_threads(threads); }
