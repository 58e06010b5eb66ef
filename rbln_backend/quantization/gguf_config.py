"""vLLM's side of checkpoints that are made of GGUF files here: which layers have blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from rbln_backend.checkpoints.block_form import BlockForm
from rbln_backend.quantization.schemes import GGUF

if TYPE_CHECKING:
    from rbln_backend.vllm_compat.quantization import QuantizeMethodBase


class RblnGgufConfig(QuantizationConfig):
    """``quantization_config.layers`` has the form of each layer with blocks."""

    def __init__(self, layers: Mapping[str, BlockForm]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers = layers

    def get_name(self) -> str:  # type: ignore[override]
        """Return the value of ``quantization_config.quant_method``."""
        return GGUF

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """All that there are kernels for."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU has to have anything."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: config.json has it."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RblnGgufConfig:
        """Of ``quantization_config``."""
        return cls({name: BlockForm(**form) for name, form in config["layers"].items()})

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that multiplies by ``layer``'s weights; None for unquantized layers."""
        # What it imports takes a while, and the name has to be known before any checkpoint is.
        from rbln_backend.quantization.gguf_blocks import block_method

        return block_method(self._layers, self.packed_modules_mapping, layer, prefix)


@cache
def register() -> None:
    """Register the name with vLLM in this process; idempotent."""
    register_quantization_config(GGUF)(RblnGgufConfig)
