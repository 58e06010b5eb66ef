"""Plain text, as `/v1/completions` continues it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random


@cache
def paragraphs() -> tuple[str, ...]:
    """Return the paragraphs of prose.txt; blank lines part them."""
    text = (Path(__file__).parent / "prose.txt").read_text(encoding="utf-8")
    return tuple(part.strip() for part in text.split("\n\n"))


def draw(rng: Random) -> str:
    """Draw one to three paragraphs."""
    return "\n\n".join(rng.sample(paragraphs(), rng.choice((1, 1, 2, 3))))
