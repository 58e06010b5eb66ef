"""What goes to a trial process and what comes back, and the work itself."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.structured_outputs.constraint import Constraint, Kind, SchemaLimits, UnusableError
from server.structured_outputs.inspection import inspect, parsed
from server.structured_outputs.rewriting.rewriting import rewrite

Trial = Callable[[str, str], list[str]]
"""Tries one grammar of a kind; returns warnings.

Raises ValueError or RuntimeError, or TimeoutError for one that was slow this time.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ended: `reason` is None if the constraints can be used.

    `part` is the constraint that cannot, `seconds` what compiling took. `grammar` is what the
    engine is to follow instead of a schema; for one alone. `measured` says that the reason is a
    time, which may be another at the next trial.
    """

    reason: str | None = None
    part: int = 0
    seconds: float | None = None
    grammar: str | None = None
    measured: bool = False

    def to_bytes(self) -> bytes:
        """Return the verdict as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Verdict:
        """Return the verdict of `to_bytes`."""
        return cls(**json.loads(data))


def job_bytes(constraints: Sequence[Constraint], limits: SchemaLimits) -> bytes:
    """Return a job as JSON."""
    parts = [(c.kind.value, c.text, c.exact, c.derived, c.tagged) for c in constraints]
    head = {"shares": shares_of(constraints), "limits": dataclasses.asdict(limits)}
    return json.dumps({**head, "parts": parts}).encode()


def shares_of(constraints: Sequence[Constraint]) -> int:
    """Return how many times the processor time of one constraint a job may take."""
    return max(constraint.shares for constraint in constraints)


def do_job(
    data: bytes, trial: Trial, *, compact: bool, on_shares: Callable[[int], None] | None = None
) -> Verdict:
    """Inspect and try the constraints of a job, up to the first that cannot be used.

    `compact`: their JSON has no whitespace. `on_shares` gets the job's shares before the work.
    """
    job = json.loads(data)
    if on_shares is not None:
        on_shares(job["shares"])
    limits = SchemaLimits(**job["limits"])
    started = time.perf_counter()
    grammar = None
    for part, (kind, text, exact, derived, tagged) in enumerate(job["parts"]):
        constraint = Constraint(Kind(kind), text, "", exact, derived, tagged)
        try:
            if not derived:
                inspect(constraint, limits)
            grammar = _rewritten(constraint, compact=compact)
            if grammar is None:
                _try(constraint, kind, text, trial)
            else:
                _try(constraint, Kind.GRAMMAR.value, grammar, trial)
        except UnusableError as error:
            return Verdict(str(error), part, time.perf_counter() - started)
        except TimeoutError as error:
            return Verdict(str(error), part, time.perf_counter() - started, measured=True)
    return Verdict(seconds=time.perf_counter() - started, grammar=grammar)


def _rewritten(constraint: Constraint, *, compact: bool) -> str | None:
    """Return the grammar of a schema; None for what is taken as it is."""
    if constraint.kind is not Kind.JSON or constraint.tagged:
        return None
    schema = parsed(constraint.text)
    try:
        found = rewrite(schema, compact=compact)
    except RecursionError:
        raise UnusableError("it is nested too deeply to be rewritten") from None
    if found.left_out and constraint.exact:
        raise UnusableError(found.left_out[0])
    return found.grammar


def _try(constraint: Constraint, kind: str, text: str, trial: Trial) -> None:
    try:
        told = trial(kind, text)
    except (ValueError, RuntimeError, TypeError, KeyError, MemoryError) as error:
        raise UnusableError(_plain(str(error)) or type(error).__name__) from None
    told = [line for line in told if "warning" in line.lower() and not _HARMLESS.search(line)]
    if told and constraint.exact:
        raise UnusableError(_plain(told[0]))


# A backslash that was not needed: the character is taken as meant.
_HARMLESS = re.compile(r"matching the character literally|The character itself will be matched")
_PLACE = re.compile(r"^(\[[\d:]+\] )?\S*\.(cc|h):\d+: ")
_CHECK = re.compile(r"^Check failed: \(.*\) is false: ")
_MAX_REASON = 300


def _plain(message: str) -> str:
    """Return a native message without the place in the source that it comes from."""
    text = _PLACE.sub("", " ".join(message.split())).removeprefix("Warning: ").rstrip(". ")
    text = _CHECK.sub("", text)
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 3]}..."
