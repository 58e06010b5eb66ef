"""The native kernels, built once for all test runs, and back to one thread after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rbln_backend.attention.ops  # noqa: F401  defines the attention ops
from rbln_backend.emulator.build import KernelSet, load_kernels, set_threads
from tests.kernel_cache import share_kernels


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelSet:
    return load_kernels(share_kernels(tmp_path_factory.mktemp("kernels")), "native")


@pytest.fixture(autouse=True)
def native_kernels(kernels: KernelSet) -> Iterator[Path]:
    torch.manual_seed(0)
    assert kernels.library is not None
    yield kernels.library
    set_threads(1)
