"""The limits of one API key, and their form in key files and flags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key, None for no limit, and the weight of its share of the permits.

    A token per minute is one of a prompt or of an answer.
    """

    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0

    def changed(self, options: Iterable[str]) -> KeyLimits:
        """Return these limits with `options` such as `rpm:60`. Raises `ValueError`."""
        values: dict[str, Any] = {}
        for option in options:
            name, _, text = option.partition(":")
            if name not in _OPTIONS:
                raise ValueError(f"{name!r} is no limit; known: {', '.join(_OPTIONS)}")
            field, read = _OPTIONS[name]
            try:
                values[field] = read(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}, got {text!r}") from None
        return replace(self, **values)


NO_LIMITS = KeyLimits()


def _limit(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("must be a whole number, 0 for no limit")
    return int(text) or None


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= MAX_WEIGHT:
        raise ValueError(f"must be a number above 0, at most {MAX_WEIGHT:g}")
    return weight


_OPTIONS: Mapping[str, tuple[str, Callable[[str], float | None]]] = {
    "in-flight": ("max_in_flight", _limit),
    "rpm": ("requests_per_minute", _limit),
    "tpm": ("tokens_per_minute", _limit),
    "weight": ("weight", _weight),
}
