"""Which of the documented ways computes the experts; decided once per layer, when it is made."""

from __future__ import annotations

from typing import Literal, NamedTuple

PathName = Literal["opt", "custom", "glu", "native"]

OPT_SWITCH = "VLLM_RBLN_MOE_USE_OPT_KERNEL"
CUSTOM_SWITCH = "VLLM_RBLN_MOE_CUSTOM_KERNEL"
# What the SDK's op computes itself: vllm-rbln 0.12 names SiLU and GELU.
_GLU_ACTIVATIONS = ("silu", "gelu")


class Choice(NamedTuple):
    """A path and why it was taken."""

    path: PathName
    reason: str


def choose_path(*, use_opt: bool, use_custom: bool, is_npu: bool, activation: str) -> Choice:
    """The optimised kernel before the custom one before plain operators.

    The SDK that pairs with vLLM 0.30 has a single op for both switches.
    """
    if not use_opt and not use_custom:
        return Choice("native", f"{OPT_SWITCH} and {CUSTOM_SWITCH} are off")
    if is_npu:
        return _choose_on_npu(activation)
    if use_opt:
        return Choice("opt", f"{OPT_SWITCH} is on")
    return Choice("custom", f"{CUSTOM_SWITCH} is on and {OPT_SWITCH} off")


def _choose_on_npu(activation: str) -> Choice:
    if activation not in _GLU_ACTIVATIONS:
        return Choice("native", f"the SDK's op for experts has no activation {activation!r}")
    return Choice("glu", "the SDK has one op for experts")
