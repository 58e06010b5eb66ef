"""Rows of what a model returns whose layers keep axes of batch and sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rbln_backend.vllm_compat.surface import IntermediateTensors


def in_rows(result: Any) -> Any:
    """Return what a model returns, tensors [B, L, ...], as rows [B * L, ...]."""
    if isinstance(result, Tensor):
        return result.flatten(0, 1)
    if isinstance(result, IntermediateTensors):
        return IntermediateTensors({name: in_rows(x) for name, x in result.tensors.items()})
    return type(result)(in_rows(x) for x in result)
