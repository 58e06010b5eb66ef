"""The native kernels, built once for all test runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rbln_backend.devices.emulated import kernel_set
from rbln_backend.devices.emulated.kernel_set import KernelSet, load_kernels, set_threads
from tests.kernel_cache import build_variant, share_kernels


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> KernelSet:
    """This CPU's, or those that ``--kernel-variant`` names."""
    variant = request.config.getoption("--kernel-variant")
    if variant is not None:
        kernel_set._Active.native = kernel_set._open_library(build_variant(variant), "for a test")
        assert kernel_set._Active.native.isa == variant
    return load_kernels(share_kernels(tmp_path_factory.mktemp("kernels")), "native")


@pytest.fixture
def native_kernels(kernels: KernelSet) -> Iterator[Path]:
    """They are active, and have one thread again afterwards."""
    torch.manual_seed(0)
    assert kernels.library is not None
    load_kernels(kernels.library.parent, "native")
    yield kernels.library
    set_threads(1)
