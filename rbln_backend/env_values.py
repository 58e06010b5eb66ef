"""How the text of an environment variable becomes a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Parser:
    """Turns the text of a variable into a value; `parse` raises ValueError with the reason."""

    describe: str
    parse: Callable[[str], object]


def parse_bool(raw: str) -> bool:
    """Return what a switch says; raises ValueError, as the others do."""
    lowered = raw.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"Valid choices: {', '.join(_TRUE + _FALSE)}")


def parse_int(raw: str) -> int:
    """Return a number above 0."""
    value = int(raw)
    if value <= 0:
        raise ValueError("must be greater than 0")
    return value


def parse_count(raw: str) -> int:
    """Return a number that may be 0."""
    value = int(raw)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def sizes(noun: str, *, may_be_empty: bool) -> Parser:
    """Parse distinct numbers above 0; ``noun`` is what errors call them."""

    def parse(raw: str) -> tuple[int, ...]:
        if may_be_empty and not raw.strip():
            return ()
        sizes = tuple(int(part) for part in raw.split(","))
        if any(size <= 0 for size in sizes):
            raise ValueError(f"All {noun} must be greater than 0")
        if len(set(sizes)) != len(sizes):
            raise ValueError(f"All {noun} must be unique")
        return sizes

    return Parser("comma-separated integers", parse)


def parse_text(raw: str) -> str:
    """Return a text that is not empty."""
    if not raw:
        raise ValueError("must not be empty")
    return raw


def choice(*choices: str) -> Parser:
    """Parse one of ``choices``, however it is capitalised."""

    def parse(raw: str) -> str:
        lowered = raw.strip().lower()
        if lowered not in choices:
            raise ValueError(f"Valid choices: {', '.join(choices)}")
        return lowered

    return Parser(" or ".join(f"`{choice}`" for choice in choices), parse)


def parse_kernel_mode(raw: str) -> bool:
    """Return True for `triton`, the one mode that there was."""
    if raw.strip().lower() != "triton":
        raise ValueError("Valid choices: triton")
    return True


def parse_paths(raw: str) -> tuple[str, ...]:
    """Return the parts between colons; empty ones do not count."""
    return tuple(part for part in raw.split(":") if part)
