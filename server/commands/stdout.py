"""Standard output reserved for the results of commands, which scripts read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Yield standard output; output of libraries and child processes goes to standard error."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(answers), "w", encoding="utf-8") as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(answers, 1)
        os.close(answers)
