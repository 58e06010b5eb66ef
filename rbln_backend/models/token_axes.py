"""Hidden states [B, L, H] in the graphs of an NPU: its compiler wants axes of batch and sequence.

vLLM's models take rows of tokens [T, H]. Most of their layers take any leading axes; those that
count rows are given a subclass here. Source: vllm-rbln 0.12, ``model_executor/layers/mla.py``
("which the RBLN compiler requires") and ``patches/minimax_m2.py``, which says that a round trip
through rows before attention gives wrong results on an NPU. Experts have rows there, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import rotate_gptj, rotate_neox
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding,
)

from rbln_backend.limits import ROWS

_TRANSFORMERS = "vllm.model_executor.models.transformers"
# Attention that splits rows of compressed keys itself.
_OF_ROWS = frozenset(("MiniCPM3Attention",))


def refuse_rows(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` for a model with layers that cannot keep axes."""
    for name, module in model.named_modules():
        if type(module).__name__ in _OF_ROWS:
            raise ROWS.refusal(f"layer {name}")


def keep_axes(model: nn.Module) -> None:
    """Make every layer of ``model`` take and return [B, L, ...]; positions are [B, L]."""
    # A static method, which asserts rows and calls a kernel of GPUs on several ranks.
    MiniMaxText01RMSNormTP.forward_qkv = staticmethod(_normed)  # type: ignore[method-assign]
    if type(model).__module__.startswith(_TRANSFORMERS):
        _keep_axes_of_transformers(model)
    mixins: dict[type[nn.Module], type] = {
        Attention: _AttentionWithAxes,
        RotaryEmbedding: _RotaryWithAxes,
        Phi3LongRoPEScaledRotaryEmbedding: _LongRotaryWithAxes,
    }
    for module in list(model.modules()):
        layers = [child for child in module.children() if isinstance(child, Attention)]
        mixin = next((mixin for kind, mixin in mixins.items() if isinstance(module, kind)), None)
        if mixin is None and any(isinstance(child, MoERunner) for child in module.children()):
            mixin = _ExpertsOfRows
        # Models of one process share their rotary embeddings.
        if mixin is not None and not isinstance(module, mixin):
            module.__class__ = with_axes(mixin, type(module))
            if isinstance(module, _RotaryWithAxes):
                module.spread_angles()
        # The norms of heads, of a module that attends, get the axes of its attention layer.
        for norm in module.children() if len(layers) == 1 else ():
            if isinstance(norm, RMSNorm):
                norm.__class__ = with_axes(_HeadNormWithAxes, type(norm))
                norm.attention_name = layers[0].layer_name  # type: ignore[assignment]


def _keep_axes_of_transformers(model: Any) -> None:
    """Give each request a row of its own, [B, L], as transformers' classes take it.

    vLLM's Transformers backend puts all tokens of a step into one sequence [1, T].
    """
    # Only for such models: they take long to import.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from vllm.model_executor.models.transformers import check_sinks
    from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """query [B, Hq, L, D], key [B, Hkv, L, D], value [B, Hkv, L, Dv] to [B, L, Hq * Dv].

        Narrower values are padded, because vLLM's layer has one head size.
        """
        attention: Any = getattr(module, VLLM_ATTN_ATTR)
        check_sinks(module, attention, options.get("s_aux"))
        size, width = query.shape[-1], value.shape[-1]
        if width < size:
            value = functional.pad(value, (0, size - width))
        mixed: Tensor = attention(*(x.transpose(1, 2).flatten(2) for x in (query, key, value)))
        if width < size:
            mixed = mixed.view(*mixed.shape[:2], -1, size)[..., :width].flatten(2)
        return mixed, None

    ALL_ATTENTION_FUNCTIONS.register("vllm", attend)
    inner: nn.Module = model.model
    inner.__class__ = with_axes(_InnerWithAxes, type(inner))


class _InnerWithAxes:
    """Mixed into transformers' model, whose caller drops an axis of one sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs, tensors [B, L, H], with the axis that is dropped: [1, B, L, H]."""
        upstream: Any = super()
        return _enclosed(upstream.forward(*args, **kwargs))


def _enclosed(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.unsqueeze(0)
    return tuple(_enclosed(output) for output in outputs)


def with_axes(mixin: type, layer: type) -> type:
    """Return a subclass of ``layer`` with ``mixin`` before it, under the same name."""
    return type(layer.__name__, (mixin, layer), {})


class _AttentionWithAxes:
    """Mixed into vLLM's attention layer, which returns rows."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """query [B, L, Hq * D], key and value [B, L, Hkv * D], or with axes of heads, to [B, L,
        Hq * Dv].
        """
        layer: Any = self
        width = layer.num_heads * layer.head_size_v if output_shape is None else output_shape[-1]
        upstream: Any = super()
        shape = (*_get_axes(layer.layer_name), width)
        rows: Tensor = upstream.forward(query, key, value, torch.Size(shape), output_dtype)
        return rows.view(shape)


class _HeadNormWithAxes:
    """Mixed into norms of heads, to which some models give rows."""

    attention_name: str

    def forward(self, x: Tensor, *residual: Tensor | None) -> Any:
        """x [B * L, heads, D] to the same, computed with axes; other shapes as upstream."""
        upstream: Any = super()
        axes = _get_axes(self.attention_name)
        if x.dim() != 3 or x.shape[:2] == axes:
            return upstream.forward(x, *residual)
        return upstream.forward(x.view(*axes, *x.shape[1:])).view(x.shape)


class _RotaryWithAxes:
    """Mixed into vLLM's rotary embeddings, which differ in how they fill their cache alone.

    As vllm-rbln 0.12 (``patches/rotary_embedding.py``): heads come before tokens, and each number
    of a head has its own cosine and sine.
    """

    def spread_angles(self) -> None:
        """Add ``cos_cache`` and ``sin_cache`` [positions, rotated] to the layer's buffers."""
        layer: Any = self
        for name, half in zip(
            ("cos_cache", "sin_cache"), self._table().chunk(2, dim=-1), strict=True
        ):
            is_halved = layer.is_neox_style
            full = half.repeat(1, 2) if is_halved else half.repeat_interleave(2, dim=1)
            layer.register_buffer(name, full, persistent=False)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """positions [B, L], query and key [B, L, columns] or [B, L, heads, D], to the same."""
        layer: Any = self
        first, rows = self._first_row(), positions.flatten()
        rows = rows + first if first else rows
        cos, sin = (
            cache.index_select(0, rows).view(len(positions), 1, positions.shape[1], -1)
            for cache in (layer.cos_cache, layer.sin_cache)
        )
        if cos.dtype != query.dtype:
            cos, sin = cos.to(query.dtype), sin.to(query.dtype)
        turned = self._turned(query, cos, sin)
        return turned, None if key is None else self._turned(key, cos, sin)

    def _table(self) -> Tensor:
        """Return cosines and sines [positions, rotated], each of half of the numbers."""
        table: Tensor = self.cos_sin_cache  # type: ignore[attr-defined]
        return table

    def _first_row(self) -> int:
        return 0

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, L, columns], cos and sin [B, 1, L, rotated]."""
        layer: Any = self
        size, rotated = layer.head_size, layer.rotary_dim
        heads = x.view(*x.shape[:2], -1, size)
        # The vendor slices no empty part, either ("if slice size is zero, DO NOT slice").
        turning = (heads if rotated == size else heads[..., :rotated]).transpose(1, 2)
        other = rotate_neox(turning) if layer.is_neox_style else rotate_gptj(turning)
        turned = (turning * cos + other * sin).transpose(1, 2)
        if rotated != size:
            turned = torch.cat((turned, heads[..., rotated:]), dim=-1)
        return turned.reshape(x.shape)


class _LongRotaryWithAxes(_RotaryWithAxes):
    """Mixed into LongRoPE, whose cache has short contexts before long ones."""

    is_neox_style = True

    def _table(self) -> Tensor:
        table: Tensor = self.long_short_cos_sin_cache  # type: ignore[attr-defined]
        return table

    def _first_row(self) -> int:
        """The context's length chooses the part, for all requests."""
        layer: Any = self
        return layer.original_max_position_embeddings if layer.use_long_rope else 0


class _ExpertsOfRows:
    """Mixed into blocks of a router and experts, which take rows."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """hidden_states [B, L, H] to the same."""
        upstream: Any = super()
        rows: Tensor = upstream.forward(hidden_states.flatten(0, -2), *args, **kwargs)
        return rows.view(hidden_states.shape)


def _get_axes(layer_name: str) -> tuple[int, int]:
    """Return B and L of the graph that is being captured."""
    metadata: Any = get_forward_context().attn_metadata
    own = metadata[layer_name]
    return own.batch_size, own.query_len


def _normed(
    q_norm: Any, k_norm: Any, qkv: Tensor, q_size: int, kv_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """MiniMax-M2's norms over the heads of all ranks: qkv [..., columns] to q, k and v."""
    q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
    squares = [x.float().pow(2).mean(dim=-1, keepdim=True) for x in (q, k)]
    if q_norm.tp_world > 1:
        # vLLM's norm sums rows [T].
        summed = tensor_model_parallel_all_reduce(torch.cat(squares, dim=-1))
        squares = list((summed / q_norm.tp_world).chunk(2, dim=-1))
    return _scaled(q_norm, q, squares[0]), _scaled(k_norm, k, squares[1]), v


def _scaled(norm: Any, x: Tensor, square: Tensor) -> Tensor:
    """x [..., columns] over the root of ``square`` [..., 1], in float32, times the weight."""
    scaled: Tensor = x.float() * torch.rsqrt(square + norm.variance_epsilon) * norm.weight
    return scaled.to(x.dtype)
