"""Wrapper that vLLM's LoRA layers call to add the adapters' part as one op."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from rbln_backend.vllm_compat.lora import LoRAConfig, PunicaWrapperBase


class RblnPunicaWrapper(PunicaWrapperBase):
    """Adds adapters by the slots of the step; made by vLLM, see ``Platform.get_punica_wrapper``."""

    slots: Tensor
    """int32 [requests], an input of the graph that is being captured."""

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        *,
        lora_config: LoRAConfig,
        **_: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self._rank = lora_config.max_lora_rank

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add to y [T, outputs] what the adapters make of x [T, inputs]; see ``SlotStack``.

        The scale is in the weights already.
        """
        torch.ops.rbln_emulator.add_lora_.default(
            *(y, x, self.slots, lora_a_stacked[0], list(lora_b_stacked)),
            *(self._rank, list(output_slices)),
        )

    def add_shrink(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("fully sharded adapters are refused")

    def add_expand(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("fully sharded adapters are refused")

    def add_lora_embedding(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("embeddings are not adapted")

    def add_lora_logits(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("the LM head adds its share as a linear layer does")
