"""MiniMax-M2.7 as the vendor deploys it, small: FP8 experts, an FP8 cache, blocks of 4,096."""

from pathlib import Path
from typing import Any

from tests.engine.support import make_prompts
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

BLOCK, LAYERS = 4096, 4
# One for each engine.
PROMPTS = make_prompts([90, BLOCK + 104, 40, 128], seed=9)
AS_DEPLOYED: dict[str, Any] = {"kv_cache_dtype": "fp8", "block_size": BLOCK}
AS_DEPLOYED |= {"max_model_len": 2 * BLOCK, "max_num_batched_tokens": 512}
CACHE_SCALES = ((1.0, 1.0),) * LAYERS
"""Of keys and values in each layer: the checkpoint has none."""


def make_minimax(path: Path) -> Path:
    """Write the checkpoint into ``path``, and a float32 one of the same values into its "plain"."""
    recipe = Recipe(format="fp8", block=(32, 64), skipped=("block_sparse_moe.gate",))
    sizes = {"intermediate_size": 128, "num_hidden_layers": LAYERS}
    context = {"max_position_embeddings": 2 * BLOCK}
    return make_quantized_checkpoint("minimax_m2", path, recipe, **sizes, **context)
