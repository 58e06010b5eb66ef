"""vLLM layers that a device replaces by its own.

vLLM replaces a layer class by one registered under its name. Those of the emulated device differ
from the originals in ``forward_native`` only, which calls the kernels when traced, so weights,
loading and configuration stay upstream's. The head of a model whose embedding is the head takes no
memory: vLLM makes such a head with a table of its own and ties it afterwards, which drops the
table. Our allocator has the system lend the pages of what it gives out; those of this table would
stay unused.

On an NPU each tensor-parallel rank has the whole table of token embeddings, so a graph needs
neither a mask of tokens nor a collective to look them up, as in vllm-rbln 0.12
(``model_executor/layers/vocab_parallel_embedding.py``). LM heads stay shared out among ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import (
    FastGELU,
    GeluAndMul,
    NewGELU,
    QuickGELU,
    ReLUSquaredActivation,
    SiluAndMul,
)
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from rbln_backend.devices.emulated.memory import zeros_on_demand
from rbln_backend.devices.port import device_capabilities
from rbln_backend.settings import configured


class RblnLMHead(ParallelLMHead):
    """vLLM's head; one that is filled in spite of it gets its pages as they are written."""

    def __init__(self, *args: Any, **options: Any) -> None:
        config = get_current_vllm_config().model_config.hf_text_config
        if not getattr(config, "tie_word_embeddings", False):
            super().__init__(*args, **options)
            return
        with _OnDemand():
            super().__init__(*args, **options)


class _OnDemand(TorchFunctionMode):
    """Allocate with ``torch.empty``, whose pages are mapped on first use."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is not torch.empty:
            return func(*args, **options)
        like: Tensor = func(0, **options)
        if like.device.type != "cpu":
            # Of a model without weights.
            return func(*args, **options)
        shape = args[0] if isinstance(args[0], Sequence) else args
        return zeros_on_demand(shape, like.dtype)


def _normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    ops = torch.ops.rbln_emulator
    if residual is None:
        normed: Tensor = ops.rms_norm(x, weight, epsilon)
        return normed
    pair: tuple[Tensor, Tensor] = ops.fused_add_rms_norm(x, residual, weight, epsilon)
    return pair


class EmulatedRMSNorm(RMSNorm):
    """RMSNorm over the last dimension, with or without the residual addition."""

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x, residual [..., K] or None: returns the norm, and the sum if there is a residual."""
        if self.variance_size_override is not None or not self.has_weight:
            return super().forward_native(x, residual)
        return _normalise(x, residual, self.weight, self.variance_epsilon)


class EmulatedGemmaRMSNorm(GemmaRMSNorm):
    """RMSNorm whose weight is stored less one and multiplies in float32."""

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x, residual [..., K] or None: returns the norm, and the sum if there is a residual."""
        return _normalise(x, residual, self.weight.float() + 1.0, self.variance_epsilon)


def _activation(layer: type[nn.Module], function: str, *, gated: bool) -> type[nn.Module]:
    """Return ``layer`` [..., I] to [..., I] of its dtype, which calls the kernel's ``function``."""

    def forward_native(_self: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.rbln_emulator.activate(x, function, gated)
        return result

    return type(f"Emulated{layer.__name__}", (layer,), {"forward_native": forward_native})


class EmulatedGeluAndMul(GeluAndMul):
    """gelu(x[..., :d]) * x[..., d:], by the error function or its approximation."""

    def forward_native(self, x: Tensor) -> Tensor:
        """x [..., 2 * I] to [..., I] of its dtype."""
        function = "gelu_tanh" if self.approximate == "tanh" else "gelu"
        result: Tensor = torch.ops.rbln_emulator.activate(x, function, True)
        return result


class _RotaryKernel:
    """Rotary embedding of query [T, Hq*D] and key [T, Hkv*D] by whatever cos_sin_cache holds.

    Both may be [T, H, D] as well. Mixed into vLLM's layers, whose common base has no such method.
    """

    cos_sin_cache: Tensor
    head_size: int
    is_neox_style: bool

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """positions [T], query and key [T, columns] to rotated query and key."""
        if key is None or self.cos_sin_cache.dtype != query.dtype:
            # The layer that this class is mixed into.
            upstream: Any = super()
            turned_there: tuple[Tensor, Tensor | None] = upstream.forward_native(
                positions, query, key
            )
            return turned_there
        rows = (x.flatten(1) if x.dim() == 3 else x for x in (query, key))
        turned: tuple[Tensor, Tensor] = torch.ops.rbln_emulator.rotary_embedding(
            positions, *rows, self.cos_sin_cache, self.head_size, self.is_neox_style
        )
        if query.dim() == 2:
            return turned
        return turned[0].view(query.shape), turned[1].view(key.shape)


# These differ in how they fill the cache, never in how they apply it.
_ROTARY_LAYERS = (
    RotaryEmbedding,
    DeepseekScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

_REPLACEMENTS: dict[str, type[nn.Module]] = {
    "RMSNorm": EmulatedRMSNorm,
    "GemmaRMSNorm": EmulatedGemmaRMSNorm,
    "SiluAndMul": _activation(SiluAndMul, "silu", gated=True),
    "GeluAndMul": EmulatedGeluAndMul,
    # Upstream's two approximations of GELU by tanh differ in the order of their roundings.
    "NewGELU": _activation(NewGELU, "gelu_tanh", gated=False),
    "FastGELU": _activation(FastGELU, "gelu_tanh", gated=False),
    "QuickGELU": _activation(QuickGELU, "quick_gelu", gated=False),
    "ReLUSquaredActivation": _activation(ReLUSquaredActivation, "relu2", gated=False),
    **{
        layer.__name__: type(f"Emulated{layer.__name__}", (_RotaryKernel, layer), {})
        for layer in _ROTARY_LAYERS
    },
}


def install_layers() -> None:
    """Register the replacements with vLLM; idempotent, once per process."""
    for name, layer in _REPLACEMENTS.items():
        if layer.__dict__.get("name") is None:
            CustomOp.register_oot(name=name)(layer)
    if RblnLMHead.__dict__.get("name") is None:
        ParallelLMHead.register_oot(name=ParallelLMHead.__name__)(RblnLMHead)


class RblnEmbedding(VocabParallelEmbedding):
    """vLLM's layer, whole on an NPU unless it is the LM head as well."""

    def __init__(self, *args: Any, disable_tp: bool = False, **options: Any) -> None:
        config = get_current_vllm_config()
        on_npu = not device_capabilities(configured(config)).runs_on_host
        is_whole = disable_tp or (on_npu and not _is_head(config))
        super().__init__(*args, disable_tp=is_whole, **options)


def _is_head(config: VllmConfig) -> bool:
    """Of the served model too: a draft model reads its embedding."""
    models: list[ModelConfig | None] = [config.model_config]
    if config.speculative_config is not None:
        models.append(config.speculative_config.target_model_config)
    return any(getattr(x.hf_text_config, "tie_word_embeddings", False) for x in models if x)


def install_embedding() -> None:
    """Register the layer with vLLM; idempotent, once per process."""
    if RblnEmbedding.__dict__.get("name") is None:
        VocabParallelEmbedding.register_oot(name=VocabParallelEmbedding.__name__)(RblnEmbedding)
