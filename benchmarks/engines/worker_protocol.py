"""Answers of measured engines, and the pipe that carries them.

Pure Python without the engines' libraries: workers run in different environments. A command and its
answer are one line of JSON each:

    {"prompts": [[1, 2, ...], ...], "output_tokens": 128, "budget_seconds": 10.0}
    {"seconds": 1.234, "tokens": [[5, 6, ...], ...], "first_token_seconds": [0.5, ...],
     "step_seconds": [0.01, ...]}

The engine stops early, with fewer tokens or none for a prompt (its first-token time is then null),
when the budget is spent. `step_seconds` are times of steps that gave every prompt a token.

Invariant: answers are the only thing on the standard output that the parent gave; whatever a
library prints goes to standard error. Commands end with the input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Answers:
    """Worker's end of the pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def send(self, answer: dict[str, Any]) -> None:
        """Write one answer."""
        self._stream.write(json.dumps(answer) + "\n")

    def commands(self) -> Iterator[dict[str, Any]]:
        """Yield commands until the parent closes the pipe."""
        for line in sys.stdin:
            yield json.loads(line)


@contextmanager
def answers_to_parent() -> Iterator[Answers]:
    """Take standard output for answers alone; to be entered before libraries are used."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8") as stream:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield Answers(stream)


def timed_answer(events: list[tuple[float, list[int]]], tokens: list[list[int]]) -> dict[str, Any]:
    """Return the answer for `events`: seconds since the command, and the prompts that got a token.

    A step is timed where it, and the one before it, gave every prompt a token.
    """
    first: dict[int, float] = {}
    full = [len(prompts) == len(tokens) for _, prompts in events]
    for time, prompts in events:
        for prompt in prompts:
            first.setdefault(prompt, time)
    pairs = zip(events, events[1:], full, full[1:], strict=False)
    return {
        "seconds": events[-1][0] if events else 0.0,
        "tokens": tokens,
        "first_token_seconds": [first.get(prompt) for prompt in range(len(tokens))],
        "step_seconds": [b[0] - a[0] for a, b, is_full, and_next in pairs if is_full and and_next],
    }
