"""The gate: no grammar passes that the engine could not follow, or not soon.

Verdicts are remembered by what they are about; requests that ask the same at once share one trial.
Invariant: nothing here computes for long on the event loop, whatever the grammar is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cachetools import LRUCache

from server.errors import (
    InternalError,
    InvalidGrammarError,
    InvalidSchemaError,
    NotTriedError,
    OverloadedError,
    RequestError,
)
from server.host.job_counts import JobCounts
from server.host.job_pool import (
    JobCrashedError,
    JobSpentError,
    JobTimeoutError,
    PoolFullError,
    WorkerStartError,
)
from server.structured_outputs.constraint import Constraint, Kind, SchemaLimits, job_key
from server.structured_outputs.request_constraints import ANY_OBJECT, kind_of
from server.structured_outputs.rewriting.rewriting import rewrite
from server.structured_outputs.trial_job import Verdict, job_bytes, shares_of

_DOUBT_S = 60.0
"""Seconds for which a crash or a time is remembered, which may owe to the machine."""


class Pool(Protocol):
    """What runs trials: a `JobPool`."""

    @property
    def timeout_s(self) -> float:
        """Seconds that a job may take."""
        ...

    async def run(self, job: bytes, shares: int = 1) -> bytes:
        """Return the answer to a job of so many shares; raises the pool's errors."""
        ...


class GrammarGate:
    """Used from one event loop."""

    def __init__(
        self,
        limits: SchemaLimits,
        pool: Pool,
        cache_entries: int,
        cpu_s: float,
        *,
        compact: bool = False,
    ) -> None:
        """`cpu_s` is what the pool's processes give a trial; `compact`: JSON has no whitespace."""
        self._limits = limits
        self._pool = pool
        self._cpu_s = cpu_s
        self._any_object = Verdict(grammar=rewrite(json.loads(ANY_OBJECT), compact=compact).grammar)
        self._counts = JobCounts()
        # With the time until which the verdict holds.
        self._known: LRUCache[bytes, tuple[Verdict, float]] = LRUCache(cache_entries)
        self._running: dict[bytes, asyncio.Task[Verdict]] = {}

    async def check(
        self, jobs: list[list[Constraint]], on_kind: Callable[[str], None] | None = None
    ) -> dict[bytes, str | None]:
        """Let a request pass that has these constraints (`constraints_of`).

        `on_kind` hears first how its answer is guided, if it is. Raises `InvalidSchemaError` or
        `InvalidGrammarError` naming the field, `OverloadedError` if too many grammars wait for
        their trial, `NotTriedError` if the machine is too busy for it.
        """
        if jobs and on_kind is not None:
            on_kind(kind_of(jobs))
        return {job_key(job, exact=False): await self.check_job(job) for job in jobs}

    async def check_job(self, job: Sequence[Constraint]) -> str | None:
        """Let constraints pass that are compiled together; raises as `check` does.

        Returns the grammar to follow instead of a schema.
        """
        verdict, _ = await self.verdict(job)
        if verdict.reason is not None:
            raise refusal(job[verdict.part], verdict.reason)
        return verdict.grammar

    def take_counts(self) -> JobCounts:
        """Return what was done since the last call."""
        counts, self._counts = self._counts, JobCounts()
        return counts

    async def verdict(self, job: Sequence[Constraint]) -> tuple[Verdict, bool]:
        """Return the verdict on constraints that are compiled together, and whether it was known.

        Raises `OverloadedError`, `NotTriedError`, or `InternalError` if no trial process starts.
        """
        if all(item.kind is Kind.JSON and item.text == ANY_OBJECT for item in job):
            return self._any_object, True
        if (too_large := self._too_large(job)) is not None:
            self._counts.note("refused")
            return too_large, False
        key = job_key(job)
        verdict, until = self._known.get(key, (None, 0.0))
        if verdict is not None and time.monotonic() < until:
            self._counts.note("known" if verdict.reason is None else "refused")
            return verdict, True
        if (task := self._running.get(key)) is None:
            task = asyncio.create_task(self._try(job))
            self._running[key] = task
            task.add_done_callback(lambda done: self._finish(key, done))
        # A client that leaves does not end what others may wait for.
        return await asyncio.shield(task), False

    def _too_large(self, job: Sequence[Constraint]) -> Verdict | None:
        limit = self._limits.max_bytes
        for part, item in enumerate(job):
            if item.derived:
                continue
            # Characters first: to encode a text of megabytes takes its time.
            if len(item.text) > limit or len(item.text.encode(errors="replace")) > limit:
                return Verdict(f"it has more than {limit} bytes, the limit of this server", part)
        return None

    async def _try(self, job: Sequence[Constraint]) -> Verdict:
        shares = shares_of(job)
        try:
            answer = await self._pool.run(job_bytes(job, self._limits), shares)
        except PoolFullError:
            self._counts.note("overloaded")
            raise OverloadedError(
                "Too many new grammars wait to be compiled; ones that were used before are not "
                "held up.",
                rejection="grammars",
                retry_after_s=self._cpu_s,
            ) from None
        except JobTimeoutError:
            limit_s = shares * self._pool.timeout_s
            self._counts.note("timeout", limit_s)
            raise NotTriedError(
                f"The grammar in '{job[0].param}' could not be tried within {limit_s:g} s, for "
                "the machine is busy. This says nothing of the grammar; try again.",
                param=job[0].param,
                retry_after_s=self._cpu_s,
            ) from None
        except JobSpentError:
            self._counts.note("spent", shares * self._cpu_s)
            return self._remember(job, self._spent(shares))
        except JobCrashedError:
            self._counts.note("crashed")
            reason = "it needs more memory than it may have, or breaks the grammar compiler"
            return self._remember(job, Verdict(reason, measured=True))
        except WorkerStartError as error:
            self._counts.note("not_started")
            raise InternalError(f"Grammars cannot be compiled: {error}.") from None
        verdict = Verdict.from_bytes(answer)
        self._counts.note("ok" if verdict.reason is None else "refused", verdict.seconds)
        return self._remember(job, verdict)

    def _spent(self, shares: int) -> Verdict:
        limit_s = shares * self._cpu_s
        return Verdict(
            f"it takes more than {limit_s:g} s of processor time to compile, the limit of this "
            f"server (--schema-compile-cpu-s); it can be tried again after {_DOUBT_S:g} s",
            seconds=limit_s,
            measured=True,
        )

    def _remember(self, job: Sequence[Constraint], verdict: Verdict) -> Verdict:
        known = verdict, time.monotonic() + (_DOUBT_S if verdict.measured else float("inf"))
        self._known[job_key(job)] = known
        if verdict.reason is None:
            # Good for those who ask for less.
            self._known[job_key(job, exact=False)] = known
        return verdict

    def _finish(self, key: bytes, task: asyncio.Task[Verdict]) -> None:
        del self._running[key]
        if not task.cancelled():
            # Seen, also when everybody who waited for it has left.
            task.exception()


def refusal(constraint: Constraint, reason: str) -> RequestError:
    """Return the error for a constraint that cannot be used."""
    kind = InvalidSchemaError if constraint.kind is Kind.JSON else InvalidGrammarError
    what = "schema" if constraint.kind is Kind.JSON else "grammar"
    return kind(
        f"The {what} in '{constraint.param}' cannot be used: {reason}.", param=constraint.param
    )
