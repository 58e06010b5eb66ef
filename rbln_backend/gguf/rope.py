"""Rotary positions as a GGUF file has them: by keys, and as one divisor for each frequency."""

from __future__ import annotations

import math
from typing import Any

import torch

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.keys import ModelKeys
from rbln_backend.gguf.reader import GgufFile

FACTORS = "rope_freqs.weight"
"""The tensor that holds the divisors."""

# Of all published Llama 3.1, 3.2 and 3.3; the factor alone differs, and is the largest divisor.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TOLERANCE = 1e-3


def rope_parameters(file: GgufFile, keys: ModelKeys, head_dim: int) -> dict[str, Any]:
    """Return transformers' `rope_parameters`. Raises `CheckpointError` for any other kind."""
    theta = keys.number("rope.freq_base", 10000.0)
    keys.only("rope.dimension_count", head_dim)
    kind = keys.text("rope.scaling.type", "none")
    if FACTORS in file.tensors:
        if kind != "none":
            raise CheckpointError(f"the file has {FACTORS} and scaling {kind!r} at once")
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    scaling = {
        "rope_theta": theta,
        "rope_type": kind,
        "factor": keys.number("rope.scaling.factor"),
    }
    if kind == "yarn":
        # Whether the model was trained with it; it is applied either way.
        keys.get("rope.scaling.finetuned")
        original = keys.count("rope.scaling.original_context_length")
        return {**scaling, "original_max_position_embeddings": original}
    if kind != "linear":
        raise CheckpointError(f"rope.scaling.type {kind!r} is not read; linear and yarn are")
    return scaling


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the parameters of Llama-3's rule that give the file's divisors.

    llama.cpp stores what the rule computes and not its parameters.
    """
    stored = file.read(FACTORS)
    factor = round(float(stored.max()), 3)
    if stored.shape != (head_dim // 2,) or not torch.allclose(
        stored, _llama3_factors(factor, theta, head_dim), rtol=_TOLERANCE
    ):
        raise CheckpointError(f"{FACTORS} is not what Llama-3's rule gives, so it is not read")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factors(factor: float, theta: float, head_dim: int) -> torch.Tensor:
    """The rule of Llama 3.1's reference: long wavelengths are stretched, short ones are not."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    context = _LLAMA3["original_max_position_embeddings"]
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    smooth = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).float()
