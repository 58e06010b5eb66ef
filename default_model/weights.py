"""Draws the Llama weights, each tensor from its own counter-based random stream.

Invariant: a tensor depends on (seed, name, shape, scale) alone, so the bytes do not change with the
number of threads, the CPU or the order in which tensors are drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The sizes of the checkpoint; the names are those of the Hugging Face configuration."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 2048


# Standard deviation of the next-token logits. Near 0 every token would be equally likely; this
# value gives the top token a clear lead without making the choice certain.
LOGIT_STD = 2.5


def _draw(name: str, shape: tuple[int, ...], std: float, seed: int) -> torch.Tensor:
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values * np.float32(std)).to(torch.bfloat16)


def _layer(shape: LlamaShape, prefix: str) -> Iterator[tuple[str, tuple[int, int], float]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_rows = shape.num_attention_heads * shape.head_dim
    kv_rows = shape.num_key_value_heads * shape.head_dim
    unit = hidden**-0.5
    # Queries and keys are drawn wider than values: scores of standard deviation 2 make attention
    # choose between tokens instead of averaging them.
    wide = unit * 2**0.5
    yield f"{prefix}.self_attn.q_proj.weight", (q_rows, hidden), wide
    yield f"{prefix}.self_attn.k_proj.weight", (kv_rows, hidden), wide
    yield f"{prefix}.self_attn.v_proj.weight", (kv_rows, hidden), unit
    yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows), q_rows**-0.5
    yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden), unit
    yield f"{prefix}.mlp.up_proj.weight", (inner, hidden), unit
    yield f"{prefix}.mlp.down_proj.weight", (hidden, inner), inner**-0.5


def llama_weights(shape: LlamaShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors under their Hugging Face names, norms of ones included."""
    hidden = shape.hidden_size
    tensors = {
        "model.embed_tokens.weight": _draw("embed", (shape.vocab_size, hidden), 1.0, seed),
        "lm_head.weight": _draw(
            "lm_head", (shape.vocab_size, hidden), LOGIT_STD * hidden**-0.5, seed
        ),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for index in range(shape.num_hidden_layers):
        prefix = f"model.layers.{index}"
        for name, size, std in _layer(shape, prefix):
            tensors[name] = _draw(name, size, std, seed)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors
