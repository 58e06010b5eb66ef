"""Wrapper that vLLM gives its LoRA layers: it holds the input of the graph with their slots."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from rbln_backend.vllm_compat.lora import PunicaWrapperBase


class RblnPunicaWrapper(PunicaWrapperBase):
    """Made by vLLM, see ``Platform.get_punica_wrapper``."""

    rows: Tensor
    """The adapters of rows, see ``RowInput``: an input of the graph that is being captured."""

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **_: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)

    def add_lora_linear(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("linear layers add their share by themselves")

    def add_shrink(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("fully sharded adapters are refused")

    def add_expand(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("fully sharded adapters are refused")

    def add_lora_embedding(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("embeddings are not adapted")

    def add_lora_logits(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("the LM head adds its share as a linear layer does")
