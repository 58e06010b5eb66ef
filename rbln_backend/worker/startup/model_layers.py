"""Our layers for quantised weights, latent attention and adapters, installed only where needed.

They are imported here late, because what they import of vLLM takes long.
"""

from __future__ import annotations

import sys

from torch import nn

from rbln_backend.quantization.weights import summary
from rbln_backend.vllm_compat.surface import VllmConfig

_CONFIGS = "rbln_backend.quantization.configs"


def register_quantization(config: VllmConfig) -> None:
    """Register our kernels with vLLM's layers of a quantised model."""
    if config.model_config.quantization is not None:
        from rbln_backend.quantization.configs import register

        register()


def quantized_summary(model: nn.Module) -> str | None:
    """Return as text which and how many layers of ``model`` are quantised; None without any."""
    if _CONFIGS not in sys.modules:
        return None
    from rbln_backend.quantization.configs import quantized_layers

    return summary(quantized_layers(model))


def install_latent_layers(config: VllmConfig) -> None:
    """Install our layers of a model with latent attention."""
    if config.model_config.use_mla:
        from rbln_backend.attention.latent import install

        install()


def install_adapted_layers(config: VllmConfig) -> None:
    """Install the layers that adapters need, before the model is made."""
    if config.lora_config is not None:
        from rbln_backend.lora.lm_head import install_logits_processor

        install_logits_processor()
