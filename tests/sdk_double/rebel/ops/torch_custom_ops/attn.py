"""The attention ops, under the name by which vllm_rbln imports them."""

from __future__ import annotations

from rebel.ops import attention, windows

__all__ = ["attention", "windows"]
