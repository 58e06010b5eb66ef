"""A tiny checkpoint of each family, written as GGUF and read back, is the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.checkpoint import write_checkpoint
from tests.checkpoints import CheckpointCache
from tests.gguf_files import write_gguf

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
_LINEAR = {"rope_type": "linear", "factor": 8.0}
_PROMPT = torch.arange(5, 205).reshape(1, -1)

MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral_full", {}),
    "qwen2": ("qwen2", {}),
    "yarn": ("qwen2", {"rope_parameters": {"rope_theta": 1e6, **_YARN}}),
    "linear": ("llama", {"rope_parameters": {"rope_theta": 1e4, **_LINEAR}}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "phi3 with a window": ("phi3", {"sliding_window": 48}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 4.0}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
}


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(_PROMPT).logits


@pytest.mark.parametrize("member", MEMBERS)
def test_a_file_is_the_model_it_was_made_of(
    member: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    arch, fields = MEMBERS[member]
    original = checkpoints(arch, **fields)
    file = write_gguf(original, tmp_path / "model.gguf")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    assert write_checkpoint(file, folder) == "weights in float32, as in the file"
    # A norm plus one, less one, is rounded where it is small.
    assert torch.allclose(logits(folder), logits(original), rtol=0, atol=1e-4)


def test_llama3_s_frequencies_are_recognised(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    rule = {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = checkpoints("llama", rope_parameters=rule)
    inverse = AutoModelForCausalLM.from_pretrained(original).model.rotary_emb.inv_freq.numpy()
    plain = 5e5 ** -(np.arange(0, 32, 2) / 32)
    factors = (plain / inverse).astype(np.float32)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    file = write_gguf(original, tmp_path / "model.gguf", extra={"rope_freqs.weight": factors})
    write_checkpoint(file, folder)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert config.rope_parameters == rule
    assert torch.allclose(logits(folder), logits(original), rtol=0, atol=1e-4)

    other = {"rope_freqs.weight": factors[::-1].copy()}
    file = write_gguf(original, tmp_path / "other.gguf", extra=other)
    with pytest.raises(CheckpointError, match="Llama-3's rule"):
        write_checkpoint(file, tmp_path)
