// The products of linear.h and quantized.h by tiles, over the same packed weights.
#pragma once

#include "linear/quantized.h"

namespace rbln {

// args.dtype is bf16; for any number of rows. Nothing calls it where there are no tiles.
void linear_by_tiles(const LinearArgs& args);

// That of quantized.h, bit for bit: bf16 or f16 activations, and whole numbers in the fields.
void quantized_linear_by_tiles(const QuantizedLinearArgs& args);

}  // namespace rbln
