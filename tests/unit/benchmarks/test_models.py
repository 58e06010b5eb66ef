"""The forms that one checkpoint takes for the sides of a comparison."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.models.gguf_model import gguf_name, interleave_heads, tensors, widen
from benchmarks.models.text_checkpoint import (
    SPECIAL_TOKENS,
    make_tokenizer,
    prompt_text,
    vocabulary,
)


def _rotate_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2)
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    )


def _rotate_neighbours(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    a, b = x[0::2], x[1::2]
    rotated = np.empty_like(x)
    rotated[0::2] = a * np.cos(angles) - b * np.sin(angles)
    rotated[1::2] = b * np.cos(angles) + a * np.sin(angles)
    return rotated


def test_scores_do_not_change_when_heads_are_interleaved() -> None:
    heads, size, hidden = 2, 6, 5
    generator = np.random.default_rng(0)
    q, k = (generator.normal(size=(heads * size, hidden)) for _ in range(2))
    x, y = (generator.normal(size=hidden) for _ in range(2))
    near, far = (position * np.array([1.0, 0.3, 0.1]) for position in (2, 7))
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        score = _rotate_halves((q @ x)[rows], near) @ _rotate_halves((k @ y)[rows], far)
        q_llama, k_llama = (interleave_heads(w, heads) for w in (q, k))
        of_llama = _rotate_neighbours((q_llama @ x)[rows], near) @ _rotate_neighbours(
            (k_llama @ y)[rows], far
        )
        assert of_llama == pytest.approx(score)


def test_gguf_tensors_keep_their_bits_and_norms_become_float32(tmp_path: Path) -> None:
    weights = {
        "model.embed_tokens.weight": torch.randn(3, 8, dtype=torch.bfloat16),
        "model.layers.0.input_layernorm.weight": torch.randn(8, dtype=torch.bfloat16),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(8, 8, dtype=torch.bfloat16),
        "model.layers.0.mlp.down_proj.weight": torch.randn(8, 4, dtype=torch.bfloat16),
    }
    save_file(weights, tmp_path / "model.safetensors")
    config = {"num_attention_heads": 2, "num_key_value_heads": 1}
    found = dict(tensors(tmp_path, config))
    assert set(found) == {
        *("token_embd.weight", "blk.0.attn_norm.weight"),
        *("blk.0.attn_q.weight", "blk.0.ffn_down.weight"),
    }
    norm = weights["model.layers.0.input_layernorm.weight"].float().numpy()
    np.testing.assert_array_equal(found["blk.0.attn_norm.weight"], norm)
    down = weights["model.layers.0.mlp.down_proj.weight"].float().numpy()
    np.testing.assert_array_equal(widen(found["blk.0.ffn_down.weight"]), down)
    q = weights["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    np.testing.assert_array_equal(widen(found["blk.0.attn_q.weight"])[[0, 1]], q[[0, 2]])


def test_a_tensor_without_a_name_in_llama_cpp_is_refused() -> None:
    with pytest.raises(KeyError):
        gguf_name("model.layers.3.self_attn.q_norm.weight")


def test_a_prompt_has_as_many_tokens_as_requested() -> None:
    tokenizer = make_tokenizer(32000)
    assert tokenizer.get_vocab_size() == 32000
    for count in (1, 32, 200):
        text = prompt_text(random.Random(count), count)
        ids = tokenizer.encode(text).ids
        assert len(ids) == count
        assert tokenizer.decode(ids) == text


def test_tokens_of_the_vocabulary_are_unique_and_nearly_all_whole_text() -> None:
    tokens, merges = vocabulary(32000)
    assert len(set(tokens)) == len(tokens) == 32000
    assert len(merges) == 32000 - 256 - len(SPECIAL_TOKENS)
    tokenizer = make_tokenizer(32000)
    broken = sum("\ufffd" in tokenizer.decode([number]) for number in range(32000))
    assert broken == 128


def test_a_vocabulary_too_small_for_the_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 4096"):
        vocabulary(4096)
