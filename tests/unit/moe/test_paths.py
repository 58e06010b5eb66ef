"""Which path the switches lead to."""

from __future__ import annotations

import pytest

from rbln_backend.layers.moe import choose_path


@pytest.mark.parametrize(
    ("opt", "custom", "npu", "activation", "path"),
    [
        (True, True, False, "silu", "opt"),
        (True, False, False, "swigluoai", "opt"),
        (False, True, False, "silu", "custom"),
        (False, False, False, "silu", "native"),
        (True, True, True, "silu", "glu"),
        (False, True, True, "silu", "glu"),
        (False, False, True, "silu", "native"),
        (True, True, True, "swigluoai", "native"),
    ],
)
def test_order(*, opt: bool, custom: bool, npu: bool, activation: str, path: str) -> None:
    choice = choose_path(use_opt=opt, use_custom=custom, has_fused_op=npu, activation=activation)
    assert choice.path == path
    assert choice.reason
