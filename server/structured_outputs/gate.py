"""The gate: rejects grammars that the engine could not follow, or not fast enough.

Verdicts are cached by constraint; concurrent requests with the same constraint share one trial.
Invariant: no grammar makes the event loop compute for long.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cachetools import LRUCache

from server import bounds
from server.errors import (
    InternalError,
    InvalidGrammarError,
    InvalidSchemaError,
    NotTriedError,
    OverloadedError,
    RequestError,
)
from server.host.job_pool import (
    JobCounts,
    JobCrashedError,
    JobPool,
    JobSpentError,
    JobTimeoutError,
    PoolFullError,
    WorkerStartError,
    process_starter,
)
from server.settings import ServerSettings
from server.structured_outputs.constraint import (
    ANY_OBJECT,
    Constraint,
    ConstraintKind,
    get_kind,
    job_key,
)
from server.structured_outputs.grammars import SchemaRules, schema_grammar
from server.structured_outputs.trial import TrialVerdict, get_shares, job_bytes, serve_trials

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_RETRY_S = 60.0
"""Seconds for which a crash or a timing is cached; the machine may have caused it."""


class GrammarGate:
    """Checks and compiles constraints; used from one event loop."""

    def __init__(
        self, max_bytes: int, pool: JobPool, cache_entries: int, cpu_s: float, *, rules: SchemaRules
    ) -> None:
        """`max_bytes` is the limit of a constraint, `cpu_s` the processor time of a trial."""
        self._max_bytes = max_bytes
        self._pool = pool
        self._cpu_s = cpu_s
        self._any_object = TrialVerdict(grammar=schema_grammar(json.loads(ANY_OBJECT), rules).text)
        self._counts = JobCounts()
        # With the time at which the verdict expires.
        self._verdicts: LRUCache[bytes, tuple[TrialVerdict, float]] = LRUCache(cache_entries)
        self._running: dict[bytes, asyncio.Task[TrialVerdict]] = {}

    async def warm_up(self) -> None:
        """Start a trial process before the first grammar. Raises `WorkerStartError`."""
        await self._pool.start_one()

    async def check(
        self, jobs: list[list[Constraint]], on_kind: Callable[[str], None] | None = None
    ) -> dict[bytes, str | None]:
        """Return the grammars of a request's constraints (`get_constraints`) by job key.

        Calls `on_kind` first with the kind of guidance, if there is any. Raises
        `InvalidSchemaError` or `InvalidGrammarError` naming the field, `OverloadedError` if too
        many grammars wait for a trial, `NotTriedError` if the machine is too busy for one.
        """
        if jobs and on_kind is not None:
            on_kind(get_kind(jobs))
        return {job_key(job, exact=False): await self.check_job(job) for job in jobs}

    async def check_job(self, job: Sequence[Constraint]) -> str | None:
        """Return the grammar that replaces a schema; None for other constraints.

        The constraints are compiled together. Raises as `check` does.
        """
        verdict, _ = await self.verdict(job)
        if verdict.reason is not None:
            raise refusal(job[verdict.part], verdict.reason)
        return verdict.grammar

    def take_counts(self) -> JobCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, JobCounts()
        return counts

    async def verdict(self, job: Sequence[Constraint]) -> tuple[TrialVerdict, bool]:
        """Return the verdict on constraints that are compiled together, and True if it was cached.

        Raises `OverloadedError`, `NotTriedError`, or `InternalError` if no trial process starts.
        """
        if all(item.kind is ConstraintKind.JSON and item.text == ANY_OBJECT for item in job):
            return self._any_object, True
        if (too_large := self._too_large(job)) is not None:
            self._counts.note("refused")
            return too_large, False
        key = job_key(job)
        verdict, expires = self._verdicts.get(key, (None, 0.0))
        if verdict is not None and time.monotonic() < expires:
            self._counts.note("known" if verdict.reason is None else "refused")
            return verdict, True
        is_shared = key in self._running
        if not is_shared:
            task = asyncio.create_task(self._try(job))
            self._running[key] = task
            task.add_done_callback(lambda done: self._finish(key, done))
        # Other requests may wait for the trial of a client that disconnects.
        found = await asyncio.shield(self._running[key])
        if is_shared:
            self._counts.note("known" if found.reason is None else "refused")
        return found, False

    def _too_large(self, job: Sequence[Constraint]) -> TrialVerdict | None:
        limit = self._max_bytes
        for part, item in enumerate(job):
            if item.derived:
                continue
            # Characters first: encoding megabytes takes time.
            if len(item.text) > limit or len(item.text.encode(errors="replace")) > limit:
                return TrialVerdict(
                    f"it has more than {limit} bytes, the limit of this server", part
                )
        return None

    async def _try(self, job: Sequence[Constraint]) -> TrialVerdict:
        """Return and remember the verdict of a trial process, or that on a job that ended it."""
        shares = get_shares(job)
        limit_s = shares * self._cpu_s
        try:
            verdict = TrialVerdict.from_bytes(await self._pool.run(job_bytes(job), shares))
            result = "ok" if verdict.reason is None else "refused"
            self._counts.note(result, verdict.seconds, verdict.memory_bytes)
        except PoolFullError:
            self._counts.note("overloaded")
            raise OverloadedError(
                "Too many new grammars wait to be compiled; grammars that were used before do not "
                "wait.",
                rejection="grammars",
                retry_after_s=self._cpu_s,
            ) from None
        except JobTimeoutError:
            timeout_s = shares * self._pool.timeout_s
            self._counts.note("timeout", timeout_s)
            raise NotTriedError(
                f"The grammar in '{job[0].param}' could not be tried within {timeout_s:g} s, "
                "because the machine is busy. The grammar may be valid; try again.",
                param=job[0].param,
                retry_after_s=self._cpu_s,
            ) from None
        except JobSpentError:
            self._counts.note("spent", limit_s)
            verdict = TrialVerdict(
                f"it takes more than {limit_s:g} s of processor time to compile, the limit of this "
                f"server (--schema-compile-cpu-s); it can be tried again after {_RETRY_S:g} s",
                seconds=limit_s,
                measured=True,
            )
        except JobCrashedError:
            self._counts.note("crashed")
            reason = "it exceeds the memory limit of a trial, or crashes the grammar compiler"
            verdict = TrialVerdict(reason, measured=True)
        except WorkerStartError as error:
            self._counts.note("not_started")
            raise InternalError(f"Grammars cannot be compiled: {error}.") from None
        expires = time.monotonic() + (_RETRY_S if verdict.measured else float("inf"))
        self._verdicts[job_key(job)] = verdict, expires
        if verdict.reason is None:
            # It holds for the best effort as well.
            self._verdicts[job_key(job, exact=False)] = verdict, expires
        return verdict

    def _finish(self, key: bytes, task: asyncio.Task[TrialVerdict]) -> None:
        del self._running[key]
        if not task.cancelled():
            # Retrieve the exception, also when all waiting clients have disconnected.
            task.exception()


def refusal(constraint: Constraint, reason: str) -> RequestError:
    """Return the error for a constraint that cannot be used."""
    kind = InvalidSchemaError if constraint.kind is ConstraintKind.JSON else InvalidGrammarError
    what = "schema" if constraint.kind is ConstraintKind.JSON else "grammar"
    return kind(
        f"The {what} in '{constraint.param}' cannot be used: {reason}.", param=constraint.param
    )


_WALL_PER_CPU = 10.0
"""Wall time of a trial, in multiples of its processor time."""


def make_gate(vllm_config: VllmConfig, settings: ServerSettings) -> GrammarGate:
    """Return the gate; its processes start with their first job."""
    # Takes 0.1 s, so it is imported here, while the engine loads: the HTTP process must listen
    # first. The processes of trials inherit it.
    import jsonschema  # noqa: F401

    cpu_s = settings.schema_compile_cpu_s
    rules = SchemaRules(
        compact=vllm_config.structured_outputs_config.disable_any_whitespace,
        closed=settings.undeclared_properties == "omit",
    )
    start = process_starter(
        settings.engine_start, serve_trials, "grammar-trials", vllm_config, cpu_s, rules
    )
    pool = JobPool("grammar trials", start, settings.schema_workers, _WALL_PER_CPU * cpu_s)
    return GrammarGate(
        settings.schema_max_bytes, pool, bounds.SCHEMA_CACHE_ENTRIES, cpu_s, rules=rules
    )
