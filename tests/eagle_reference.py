"""EAGLE's drafts over a whole text, in plain PyTorch: the reference of the engine's drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from tests.draft_checkpoints import hidden_states


class EagleReference:
    """The layer in ``own`` for the Llama ``served``, both float32."""

    def __init__(self, served: Path, own: Path) -> None:
        self._served, self._config = served, json.loads((own / "config.json").read_text())
        tensors = load_file(served / "model.safetensors")
        self._weights, self._head = load_file(own / "model.safetensors"), tensors["lm_head.weight"]
        shared = tensors["model.embed_tokens.weight"]
        self._embedding = self._weights.get("embed_tokens.weight", shared)

    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """Return ``count`` drafts after ``text``, of which the last token has no hidden state."""
        tokens = [*text[1:]]
        (hidden,) = hidden_states(self._served, [text[:-1]])
        drafts: list[int] = []
        for _ in range(count):
            layer = self._layer(torch.cat((self._embedding[torch.tensor(tokens)], hidden), dim=-1))
            drafts.append(int((self._head @ layer[-1]).argmax()))
            tokens.append(drafts[-1])
            hidden = torch.cat((hidden, layer[-1:]))
        return drafts

    def _layer(self, pairs: Tensor) -> Tensor:
        """[n, 2 H] to hidden states [n, H]."""
        x = pairs @ self._weights["fc.weight"].T
        x = x + attention(x, self._of, self._config["head_dim"])
        norm = functional.rms_norm(x, x.shape[-1:], self._of("post_attention_layernorm"), self._eps)
        gate, up = (norm @ self._of(f"mlp.{name}").T for name in ("gate_proj", "up_proj"))
        return x + (functional.silu(gate) * up) @ self._of("mlp.down_proj").T

    def _of(self, name: str) -> Tensor:
        return self._weights[f"layers.0.{name}.weight"]

    @property
    def _eps(self) -> float:
        return float(self._config["rms_norm_eps"])


def attention(x: Tensor, weight_of: Callable[[str], Tensor], width: int) -> Tensor:
    """Causal self-attention over x [n, H], heads of ``width``; ``weight_of`` has its matrices."""
    q, k, v = (
        (x @ weight_of(f"self_attn.{name}_proj").T).unflatten(-1, (-1, width)).transpose(0, 1)
        for name in "qkv"
    )
    shown = functional.scaled_dot_product_attention(
        _rotated(q)[None], _rotated(k)[None], v[None], is_causal=True, enable_gqa=True
    )
    return shown[0].transpose(0, 1).flatten(1) @ weight_of("self_attn.o_proj").T


def _rotated(x: Tensor) -> Tensor:
    """Rotate x [heads, n, D] by position, with base 10,000."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
