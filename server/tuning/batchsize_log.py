"""Sizes of steps from the log that vLLM writes with VLLM_LOG_BATCHSIZE_INTERVAL.

A line holds, for every number of tokens that a step had, how often it ran and its median time in
milliseconds, since the process began; so the last line of a process says all. vLLM does not say
which steps were prefills: sizes that fit into a decode batch are taken for decode batches.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rbln_backend.bucketing.usage import PhaseUsage, Usage

_LINE = re.compile(
    r"(?:\((?P<process>\w+ pid=\d+)\))?.*Batchsize forward time stats "
    r"\(batchsize, count, median_time\(ms\)\): (?P<stats>\[.*\])"
)


def read_log(path: Path, largest_batch: int, largest_chunk: int) -> Usage:
    """Return what the log tells. Raises `OSError`, and `ValueError` where it tells nothing."""
    last: dict[str, list[tuple[int, int, float]]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if (found := _LINE.search(line)) is not None:
                last[found["process"] or ""] = _stats(found["stats"], path)
    if not any(last.values()):
        raise ValueError(
            f"{path} holds no 'Batchsize forward time stats'; run vLLM with "
            "VLLM_LOG_BATCHSIZE_INTERVAL=60"
        )
    usage = Usage()
    for size, steps, median_ms in (one for stats in last.values() for one in stats):
        phase = usage.phases["decode" if size <= largest_batch else "prefill"]
        if size <= max(largest_batch, largest_chunk):
            # A step that ran elsewhere had no bucket: its own size is what its time is of.
            phase.note(size, size, steps * median_ms / 1000.0, steps)
        else:
            # It runs here as several chunks, and its time is that of none of them.
            full, rest = divmod(size, largest_chunk)
            phase.add(PhaseUsage({largest_chunk: full * steps}))
            phase.add(PhaseUsage({rest: steps} if rest > 1 else {}))
    return usage


def _stats(text: str, path: Path) -> list[tuple[int, int, float]]:
    try:
        return [(int(size), int(count), float(ms)) for size, count, ms in ast.literal_eval(text)]
    except (ValueError, TypeError, SyntaxError) as error:
        raise ValueError(f"{path}: cannot read {text[:80]!r}: {error}") from error
