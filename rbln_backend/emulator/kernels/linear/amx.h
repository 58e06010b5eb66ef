// The products of linear.h by tiles, over the same packed weights.
#pragma once

#include "linear/linear.h"

namespace rbln {

// args.dtype is bf16; for any number of rows. Nothing calls it where there are no tiles.
void linear_by_tiles(const LinearArgs& args);

}  // namespace rbln
