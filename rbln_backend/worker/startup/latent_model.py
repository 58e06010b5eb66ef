"""What the worker and `check` have to do with latent attention; nothing for other models."""

from __future__ import annotations

from rbln_backend.vllm_compat.surface import VllmConfig


def install_latent_layers(config: VllmConfig) -> None:
    """Let vLLM make our layers of a model with latent attention in this process."""
    if config.model_config.use_mla:
        # What it imports takes a while.
        from rbln_backend.attention.latent import install

        install()
