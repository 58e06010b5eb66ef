"""vLLM's look at a model's class, in this process.

vLLM starts a Python for each class that its cache does not know, so that CUDA is not initialised
here. There is no CUDA, and imports take that process 10 CPU seconds; tests use 40 classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def inspect_here() -> None:
    """Let vLLM import model classes in this process from now on."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _call


def _call(function: Callable[[], Any]) -> Any:
    return function()
