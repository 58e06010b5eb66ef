// `tile_products ROWS`: reads blocks of A [ROWS][32] bf16, B [16][16][2] bf16 and C [ROWS][16] f32
// from standard input, and writes C + A B of each, as core/amx.h has it.
#include <cstdio>
#include <cstdlib>

#include "core/amx.h"

int main(int, char** words) {
  const int rows = std::atoi(words[1]);
  alignas(64) static char a[16 * 64], b[16 * 64], c[16 * 64];
  rbln::amx::Block block;
  block.shape(rows);
  const auto bytes = size_t(rows) * 64;
  while (std::fread(a, 1, bytes, stdin) == bytes && std::fread(b, 1, sizeof(b), stdin) == sizeof(b) &&
         std::fread(c, 1, bytes, stdin) == bytes) {
    rbln::amx::load<0>(c, 64);
    rbln::amx::load<4>(a, 64);
    rbln::amx::load<6>(b, 64);
    rbln::amx::multiply<0, 4, 6>();
    rbln::amx::store<0>(c, 64);
    std::fwrite(c, 1, bytes, stdout);
  }
}
