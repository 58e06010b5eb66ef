"""Axes of batch and sequence in models of vLLM's Transformers backend; see ``token_axes``.

That backend puts all tokens of a step into one sequence [1, T]. Here each request has a row of its
own, [B, L], as transformers' classes take it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.model_executor.models.transformers import check_sinks
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR

from rbln_backend.text_models.token_axes import with_axes

_ATTENTION = "vllm"


def keep_axes(model: Any) -> None:
    """Make ``model``, of the Transformers backend, take and return [B, L, ...]."""
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)
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


def _attend(
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
