"""Every test here is of the native kernels."""

from pathlib import Path

import pytest

import rbln_backend.layers.attention_ops  # noqa: F401  defines the attention ops
from tests.unit.emulator.windows import BODIES, Bodies


@pytest.fixture(autouse=True)
def every_test(native_kernels: Path) -> None:
    """Load them."""


@pytest.fixture(params=BODIES)
def bodies(request: pytest.FixtureRequest) -> Bodies:
    """Attention ops by name, of the kernels and in PyTorch."""
    return BODIES[request.param]
