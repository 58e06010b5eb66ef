"""Entry to ``token_axes``, which imports layers of vLLM that only engines on an NPU need."""

from __future__ import annotations

from torch import nn


def keep_axes(model: nn.Module) -> None:
    """Make every layer of ``model`` take and return [B, L, ...]; positions are [B, L]."""
    from rbln_backend.text_models import token_axes

    token_axes.keep_axes(model)


def refuse_rows(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` for a model with layers that cannot keep axes."""
    from rbln_backend.text_models import token_axes

    token_axes.refuse_rows(model)
