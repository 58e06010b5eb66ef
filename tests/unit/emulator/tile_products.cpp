// `tile_products WHAT ROWS`: reads blocks of A, B and C from standard input, and writes C + A B of
// each, as core/amx.h has it. A is [ROWS][32] and B [16][16][2] of bf16 with C [ROWS][16] of f32, or A
// [ROWS][64] and B [16][16][4] of bytes with C of int32; WHAT is "bf16", "signed" or "unsigned".
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "core/amx.h"

int main(int, char** words) {
  const std::string_view what = words[1];
  const int rows = std::atoi(words[2]);
  alignas(64) static char a[16 * 64], b[16 * 64], c[16 * 64];
  rbln::amx::Block block;
  block.shape(rows);
  const auto bytes = size_t(rows) * 64;
  while (std::fread(a, 1, bytes, stdin) == bytes && std::fread(b, 1, sizeof(b), stdin) == sizeof(b) &&
         std::fread(c, 1, bytes, stdin) == bytes) {
    rbln::amx::load<0>(c, 64);
    rbln::amx::load<4>(a, 64);
    rbln::amx::load<6>(b, 64);
    if (what == "signed") rbln::amx::multiply_signed<0, 4, 6>();
    else if (what == "unsigned") rbln::amx::multiply_unsigned<0, 4, 6>();
    else rbln::amx::multiply<0, 4, 6>();
    rbln::amx::store<0>(c, 64);
    std::fwrite(c, 1, bytes, stdout);
  }
}
