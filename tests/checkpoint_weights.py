"""Random weights of a size that makes every part of a tiny model matter.

Next-token logits get a standard deviation of LOGIT_STD. What a model multiplies its embeddings or
its logits by is taken back in the embeddings and in the last norm, so that neither the token just
read nor a constant decides the next one.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from tests.checkpoint_families import Family

LOGIT_STD = 4.0
# Small, so that a head that shares its weights with the embeddings does not repeat the last token.
TIED_STD = 0.05
ROUTING_BIAS_STD = 0.2

_NORM = re.compile(r"(norm\w*|ln_\w+)$")
_FUSED = "qkv_proj|query_key_value|c_attn"
_QUERY_KEY = re.compile(rf"(q_proj|k_proj|{_FUSED})$")
_QUERY_KEY_NORM = re.compile(r"(q|k)_(layer)?norm$")
_LAST_NORM = re.compile(r"^\D*\b(norm|ln_f|final_layer_?norm)$")


def randomise(model: nn.Module, family: Family, seed: int) -> None:
    """Overwrite the weights of ``model``, a member of ``family`` as transformers initialises it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            mean, std = _scale(model, family, name, parameter)
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(values * std + mean)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                # Large enough to change which experts are chosen.
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * ROUTING_BIAS_STD)


def _scale(model: nn.Module, family: Family, name: str, weight: Tensor) -> tuple[float, float]:
    """(mean, standard deviation) of the parameter called ``name``."""
    owner, _, kind = name.rpartition(".")
    if _NORM.search(owner):
        gain = _last_norm_gain(model, family) if _LAST_NORM.search(owner) else 1.0
        wanted = family.head_norm if _QUERY_KEY_NORM.search(owner) else gain
        return _norm_scale(wanted, gain, kind, weight)
    if kind.endswith("bias"):
        # A constant added to the residual stream would choose the same token every time.
        return 0.0, 0.5 if owner.endswith(("q_proj", "k_proj")) else 0.1
    if kind == "sinks":
        return 0.0, 1.0
    module = model.get_submodule(owner)
    if isinstance(module, nn.Embedding):
        spread = TIED_STD if model.config.tie_word_embeddings else 1.0
        return 0.0, spread / family.embedding_multiplier
    unit = float(_fan_in(module, weight) ** -0.5)
    if module is model.get_output_embeddings():
        return 0.0, LOGIT_STD * unit
    return 0.0, unit * (2**0.5 if _QUERY_KEY.search(owner) else 1.0)


def _fan_in(module: nn.Module, weight: Tensor) -> int:
    """How many inputs one output has, of a matrix or of each matrix in a stack of experts."""
    if weight.dim() == 3 or hasattr(module, "top_k"):
        # Experts say if theirs are [inputs, outputs]; a router's is [experts, inputs].
        return int(weight.shape[1 if getattr(module, "is_transposed", False) else -1])
    return int(getattr(module, "in_features", weight.shape[0]))


def _last_norm_gain(model: nn.Module, family: Family) -> float:
    """What the last norm multiplies by, so that the logits have their standard deviation."""
    gain = 1.0 / family.logit_multiplier
    if model.config.tie_word_embeddings:
        head_std = TIED_STD / family.embedding_multiplier
        gain *= LOGIT_STD / (head_std * model.config.hidden_size**0.5)
    return gain


def _norm_scale(wanted: float, gain: float, kind: str, weight: Tensor) -> tuple[float, float]:
    if kind == "bias":
        return 0.0, 0.1 * gain
    # Some families store a norm's weight less one, and initialise it to zero.
    identity = float(weight.mean())
    return wanted - (1.0 - identity), 0.2 * gain
