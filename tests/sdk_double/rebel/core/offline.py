"""``rebel.compile``: whole models offline, which nothing here uses but its signature."""

from __future__ import annotations

from typing import Any, NoReturn


def compile(module: Any, *, dtype: str = "", **options: Any) -> NoReturn:
    """Callers look for the option ``dtype``; the offline path itself has no double."""
    raise NotImplementedError("the SDK double has no offline compiler")
