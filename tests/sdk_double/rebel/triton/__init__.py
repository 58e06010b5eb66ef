"""The shell of ``rebel.triton``: kernels can be written down, none can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rebel.triton import language

__all__ = ["jit", "language"]


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a kernel's text; nothing here compiles it."""
    return function
