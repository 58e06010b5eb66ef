"""LM heads of models whose embedding is the head, which take no memory of their own.

vLLM makes such a head with a table of its own and ties it afterwards, which drops the table. Our
allocator has the system lend the pages of what it gives out; those of this table would stay unused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rbln_backend.emulator.memory import zeros_on_demand
from rbln_backend.vllm_compat.heads import ParallelLMHead
from rbln_backend.vllm_compat.surface import get_current_vllm_config


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


def install_lm_head() -> None:
    """Register the layer with vLLM; idempotent, once per process."""
    if RblnLMHead.__dict__.get("name") is None:
        ParallelLMHead.register_oot(name=ParallelLMHead.__name__)(RblnLMHead)
