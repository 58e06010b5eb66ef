"""Parts of an answer that are serialised in a thread, after vLLM has made the rest.

vLLM makes an object for every logprob of every token, validates them and serialises them in one
call: 20 for each of 2,000 tokens block the event loop for a second. A marker replaces each part of
more than `SMALL_ENTRIES` in vLLM's JSON. A thread replaces the markers, a slice of positions at a
time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

SMALL_ENTRIES = 2000
"""Most logprobs that are made on the event loop; they take a few milliseconds."""
_BUILDER = ThreadPoolExecutor(1, thread_name_prefix="logprobs")
"""One thread: several would compete with the event loop for the interpreter's lock."""


class LateParts:
    """Deferred parts of one request's answer."""

    def __init__(self) -> None:
        self._builds: dict[str, Callable[[], str]] = {}

    def add(self, snippet: str, build: Callable[[], str]) -> None:
        """Replace `snippet`, JSON with a marker in it, by what `build` returns."""
        self._builds[snippet] = build

    async def complete(self, text: str) -> str:
        """Return the answer, or a frame of it, with its markers replaced by the parts."""
        found = [snippet for snippet in self._builds if snippet in text]
        if not found:
            return text
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_BUILDER, self._fill, text, found)

    def _fill(self, text: str, found: list[str]) -> str:
        for snippet in found:
            # With n > 1 the same prompt logprobs occur in every choice.
            text = text.replace(snippet, self._builds[snippet]())
        return text


late_var: ContextVar[LateParts | None] = ContextVar("late", default=None)
"""Deferred parts of the current request's answer; None for a request without logprobs."""


def marker() -> int:
    """Return a random number of 62 bits, which no answer contains by chance."""
    return random.SystemRandom().getrandbits(62)


def slice_size(entries: int) -> int:
    """Return the number of positions in a slice, for `entries` logprobs at each."""
    return max(1, SMALL_ENTRIES // max(1, entries))
