"""The SDK's own operators, registered when it is imported, as its callers call them in 0.12."""

from __future__ import annotations

from rebel.ops import attention, experts, latent, mxfp4, sampling, windows

__all__ = ["attention", "experts", "latent", "mxfp4", "sampling", "windows"]
