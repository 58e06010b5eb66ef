// The products of quantized.h by tiles, over the same packed weights. Nothing calls them where there
// are no tiles.
#pragma once

#include "quantized/quantized.h"

namespace rbln {

// That of quantized.h, bit for bit: bf16 or f16 activations, and whole numbers in the fields.
void quantized_linear_by_tiles(const QuantizedLinearArgs& args);

// Of expanded.h with bf16 activations and chunks of 32 depths or more, for any number of rows.
template <class Source>
void expanded_linear_by_tiles(const QuantizedLinearArgs& args);

}  // namespace rbln
