"""Names that kernels are written with."""

from __future__ import annotations


class constexpr:  # noqa: N801
    """The type of a kernel's constants."""
