"""What the worker and `check` have to do with quantised weights; nothing for other models."""

from __future__ import annotations

import sys

from torch import nn

from rbln_backend.quantization.weights import summary
from rbln_backend.vllm_compat.surface import VllmConfig

_CONFIGS = "rbln_backend.quantization.configs"


def register_quantization(config: VllmConfig) -> None:
    """Let vLLM's layers of a quantised model find our kernels in this process."""
    if config.model_config.quantization is not None:
        # What it imports takes a while.
        from rbln_backend.quantization.configs import register

        register()


def quantized_summary(model: nn.Module) -> str | None:
    """Which and how many layers of ``model`` are quantised, in words; None without any."""
    if _CONFIGS not in sys.modules:
        return None
    from rbln_backend.quantization.configs import quantized_layers

    return summary(quantized_layers(model))
