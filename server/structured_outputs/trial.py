"""The process that tries grammars, and its jobs; the server goes on if it hangs or is killed."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rbln_backend import api
from server.host.job_pool import (
    limit_growth,
    limit_processor_time,
    uncounted_processor_time,
)
from server.structured_outputs.constraint import (
    Constraint,
    ConstraintKind,
    SchemaLimits,
    UnusableError,
)
from server.structured_outputs.grammars import (
    Grammar,
    SchemaRules,
    choice_grammar,
    regex_grammar,
    schema_grammar,
    tag_grammar,
)
from server.structured_outputs.inspection import check_unrewritten, inspect, parsed

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_HOLDING_SCHEMAS = (ConstraintKind.JSON, ConstraintKind.STRUCTURAL_TAG)

Trial = Callable[[str, str], list[str]]
"""Tries one grammar of a kind and returns warnings.

Raises ValueError or RuntimeError, or TimeoutError if its masks were too slow.
"""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """Result of a trial; `reason` is None if the constraints can be used.

    `part` is the index of the constraint that cannot be used, `seconds` the time of the trial.
    `grammar` replaces a schema that was tried alone. `memory_bytes` is the most that a grammar
    took. `measured`: the reason is a timing, so that another trial may end differently.
    """

    reason: str | None = None
    part: int = 0
    seconds: float | None = None
    grammar: str | None = None
    measured: bool = False
    memory_bytes: int | None = None

    def to_bytes(self) -> bytes:
        """Return the verdict as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> TrialVerdict:
        """Return the verdict of `to_bytes`."""
        return cls(**json.loads(data))


def job_bytes(constraints: Sequence[Constraint], limits: SchemaLimits) -> bytes:
    """Return a job as JSON."""
    parts = [(c.kind.value, c.text, c.exact, c.derived, c.tagged) for c in constraints]
    head = {"shares": shares_of(constraints), "limits": dataclasses.asdict(limits)}
    return json.dumps({**head, "parts": parts}).encode()


def constraint_of(part: Sequence[Any]) -> Constraint:
    """Return the constraint of a part that `job_bytes` has written, without its place."""
    kind, text, exact, derived, tagged = part
    return Constraint(ConstraintKind(kind), text, "", exact, derived, tagged)


def shares_of(constraints: Sequence[Constraint]) -> int:
    """Return how many times the processor time of one constraint a job may take."""
    return max(constraint.shares for constraint in constraints)


def do_job(
    data: bytes,
    trial: Trial,
    rules: SchemaRules,
    *,
    specials: Mapping[str, int] | None = None,
    on_shares: Callable[[int], None] | None = None,
) -> TrialVerdict:
    """Inspect and try the constraints of a job, up to the first that cannot be used.

    `specials` are the tokenizer's special tokens (see `tag_grammar`). `on_shares` is called with
    the job's shares first.
    """
    job = json.loads(data)
    if on_shares is not None:
        on_shares(job["shares"])
    limits = SchemaLimits(**job["limits"])
    started = time.perf_counter()
    grammar = None
    for part, given in enumerate(job["parts"]):
        constraint = constraint_of(given)
        try:
            value = _value_of(constraint, limits)
            found = _grammar(constraint, value, specials or {}, rules)
            grammar = None if found is None else _followed(constraint, found)
            if grammar is None:
                if not constraint.derived:
                    check_unrewritten(constraint)
                _try(constraint, constraint.kind.value, constraint.text, trial)
            else:
                _try(constraint, ConstraintKind.GRAMMAR.value, grammar, trial)
        except UnusableError as error:
            return TrialVerdict(str(error), part, time.perf_counter() - started)
        except TimeoutError as error:
            return TrialVerdict(str(error), part, time.perf_counter() - started, measured=True)
    return TrialVerdict(seconds=time.perf_counter() - started, grammar=grammar)


def _value_of(constraint: Constraint, limits: SchemaLimits) -> Any:
    """Return the value of a schema or tag that llguidance may follow; None for others."""
    if constraint.derived:
        value = parsed(constraint.text) if constraint.kind in _HOLDING_SCHEMAS else None
    else:
        value = inspect(constraint, limits)
    return None if constraint.tagged else value


def _grammar(
    constraint: Constraint, value: Any, specials: Mapping[str, int], rules: SchemaRules
) -> Grammar | None:
    """Return the grammar of a constraint; None if it is tried as it is."""
    if constraint.kind is ConstraintKind.REGEX:
        return regex_grammar(constraint.text)
    if constraint.kind is ConstraintKind.CHOICE:
        return choice_grammar(json.loads(constraint.text))
    if value is None:
        return None
    if constraint.kind is ConstraintKind.JSON:
        return schema_grammar(value, rules)
    return tag_grammar(value, specials, rules)


def _followed(constraint: Constraint, found: Grammar) -> str:
    """Return the text of a grammar. Raises `UnusableError` for a part that it leaves out."""
    if found.left_out and constraint.exact:
        raise UnusableError(found.left_out[0])
    return found.text


def _try(constraint: Constraint, kind: str, text: str, trial: Trial) -> None:
    try:
        warnings = trial(kind, text)
    except (TypeError, KeyError):
        raise UnusableError("a part of it is missing or has a wrong type") from None
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UnusableError(_plain(str(error)) or type(error).__name__) from None
    ignored = [
        line for line in warnings if "warning" in line.lower() and not _HARMLESS.search(line)
    ]
    if ignored and constraint.exact:
        raise UnusableError(_plain(ignored[0]))


# An unnecessary backslash.
_HARMLESS = re.compile(r"matching the character literally|The character itself will be matched")
_PLACE = re.compile(r"^(\[[\d:]+\] )?\S*\.(cc|h):\d+: ")
_CHECK = re.compile(r"^Check failed: \(.*\) is false: ")
_COMPILING = re.compile(r"(?:failed to compile JSON schema|^error): ([^\n]*)", re.MULTILINE)
"""llguidance's message has the whole grammar around this line."""
_MAX_REASON = 300


def _plain(message: str) -> str:
    """Return a native message without its place in source code or grammar."""
    if found := _COMPILING.search(message):
        message = found[1]
    text = _PLACE.sub("", " ".join(message.split())).removeprefix("Warning: ").rstrip(". ")
    text = _CHECK.sub("", text)
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 3]}..."


_NICENESS = 5


def serve_trials(
    pipe: Connection, vllm_config: VllmConfig, cpu_s: float, rules: SchemaRules
) -> None:
    """Answer jobs until the pipe closes; the first message is `ready`.

    The process ends at a job that takes more than `cpu_s` of processor time per share.
    """
    import setproctitle

    setproctitle.setproctitle("rbln-serve: grammar trials")
    os.nice(_NICENESS)
    trial = api.grammar_trial(vllm_config, uncounted_processor_time)
    limit_growth()
    specials = trial.special_tokens()
    # Collections of cycles, which take a tenth of a job, wait until its answer is sent.
    gc.freeze()
    gc.disable()
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            job = pipe.recv_bytes()
            limit_processor_time(cpu_s)
            verdict = do_job(
                job,
                trial,
                rules,
                specials=specials,
                on_shares=lambda shares: limit_processor_time(cpu_s * shares),
            )
            limit_processor_time(0)
            verdict = replace(verdict, memory_bytes=trial.take_bytes())
            pipe.send_bytes(verdict.to_bytes())
            gc.collect()
