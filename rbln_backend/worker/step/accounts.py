"""Division of each step's device seconds among the API keys and models of its requests.

A step's seconds are divided in proportion to the tokens that its requests compute in it: one of
each row of a decode step, and its drafts; those of a chunk. Nothing is left for padding, which is
so charged to the requests that need the bucket. Invariant: the accounts of an engine's steps add up
to ``rbln_bucket_step_seconds``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from rbln_backend.core import Phase, StepBatch
from rbln_backend.reporting.metric_cells import CounterHandle
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.scheduler.fairness.request_account import PADDING, WARMUP, RequestAccount
from rbln_backend.vllm_compat.surface import CachedRequestState, VllmConfig
from rbln_backend.worker.step.metrics import StepMetrics

MAX_KEYS = 64
"""API keys with a series of their own; the others share one."""
MAX_MODELS = 32
"""Models and adapters with series of their own; the others share one."""
OTHER = "other"

_ENDED = 64
"""Ended requests whose accounts are kept until the next clean-up."""
_NAME = "rbln_device_seconds_total"
_DELAY_S = 0.1
"""Device seconds of steps with the same requests that are charged at once."""


class StepAccounts:
    """Charges steps to accounts. Steps that repeat the previous one cost an addition each."""

    def __init__(self, board: MetricsBoard, model: str) -> None:
        """``model``: name of the base model. Charges the start's warm-up, which has ended."""
        self._board, self._model = board, model
        self._keys, self._models = {""}, {model}
        self._handles: dict[tuple[RequestAccount, str], CounterHandle] = {}
        self._known: dict[str, CounterHandle] = {}
        """Accounts by request id, of running requests and a few that have ended."""
        self._padding = self._counter(PADDING, "", model)
        warm_up_s = board.value("rbln_startup_phase_seconds", phase=WARMUP)
        self._counter(WARMUP, "", model).inc(warm_up_s)
        self._names: list[str] = []
        """Ids of the requests of the latest step; behind its rows, those that prefill."""
        self._accounts: list[CounterHandle] = []
        self._shares: list[tuple[CounterHandle, float]] = []
        """Each account of a decode step of these requests, and its share of the seconds."""
        self._uncharged_s = 0.0
        self._batch: StepBatch | None = None

    def charge(
        self, batch: StepBatch | None, seconds: float, states: dict[str, CachedRequestState]
    ) -> None:
        """Charge a step; ``batch`` is None where it ran padding alone.

        ``states`` has the requests of ``batch`` by id.
        """
        if batch is None:
            self._padding.inc(seconds)
            return
        if batch is not self._batch:
            self._look_at(batch, states)
        if self._is_weighted(batch):
            self._add(_shares(self._accounts, _tokens(batch)), seconds)
            return
        self._uncharged_s += seconds
        if self._uncharged_s >= _DELAY_S:
            self.flush()

    def flush(self) -> None:
        """Charge the steps that have not been charged yet."""
        seconds, self._uncharged_s = self._uncharged_s, 0.0
        if seconds:
            self._add(self._shares, seconds)

    def _add(self, shares: Sequence[tuple[CounterHandle, float]], seconds: float) -> None:
        for account, share in shares:
            account.inc(seconds * share)

    def _is_weighted(self, batch: StepBatch) -> bool:
        """Return whether requests of different accounts compute different numbers of tokens."""
        return batch.phase is not Phase.DECODE and len(self._shares) > 1

    def _look_at(self, batch: StepBatch, states: dict[str, CachedRequestState]) -> None:
        """Take the accounts of a step; those of the latest one if it has the same requests."""
        self._batch = batch
        names = list(batch.input_batch.req_ids)
        if batch.decode_prefill:
            names += [request.req_id for request in batch.decode_prefill]
        if names == self._names:
            return
        self.flush()
        self._names = names
        known = self._known
        if len(known) > len(states) + _ENDED:
            known = self._known = {name: known[name] for name in states if name in known}
        for name in names:
            if name not in known:
                known[name] = self._account_of(states[name])
        self._accounts = [known[name] for name in names]
        self._shares = _shares(self._accounts, repeat(1, len(names)))

    def _account_of(self, request: CachedRequestState) -> CounterHandle:
        params, pooling = request.sampling_params, request.pooling_params
        args = params.extra_args if params is not None else None
        if pooling is not None:
            args = pooling.extra_kwargs
        adapter = request.lora_request
        model = self._model if adapter is None else adapter.lora_name
        place = (RequestAccount.of(args), model)
        handle = self._handles.get(place)
        if handle is None:
            account = place[0]
            key = _bounded(account.key, self._keys, MAX_KEYS)
            handle = self._counter(account.kind, key, _bounded(model, self._models, MAX_MODELS))
            if OTHER not in (key, model):
                self._handles[place] = handle
        return handle

    def _counter(self, kind: str, key: str, model: str) -> CounterHandle:
        return self._board.counter(_NAME, kind=kind, key=key, model=model)


class StepMeters(NamedTuple):
    """Recorders of each step: metrics by graph, and accounts."""

    metrics: StepMetrics
    accounts: StepAccounts


def step_accounts(config: VllmConfig, board: MetricsBoard) -> StepAccounts:
    """Return the accounts of an engine, under the name that clients use for its model."""
    served = config.model_config.served_model_name
    return StepAccounts(board, served[0] if isinstance(served, list) else str(served))


def _bounded(name: str, known: set[str], limit: int) -> str:
    """Return ``name`` if it is among the first ``limit`` names, else ``OTHER``."""
    if name in known:
        return name
    if len(known) >= limit:
        return OTHER
    known.add(name)
    return name


def _tokens(batch: StepBatch) -> list[int]:
    """Return the computed tokens of each request of a step."""
    rows = batch.num_reqs
    if batch.phase is Phase.VERIFY:
        counts = [1 + len(drafts) for drafts in batch.drafts]
    else:
        counts = list(batch.counts) or [1] * rows
    return [*counts, *[1] * len(batch.decode_prefill)]


def _shares(
    accounts: Sequence[CounterHandle], tokens: Iterable[int]
) -> list[tuple[CounterHandle, float]]:
    """Return each account's share of a step, by the tokens of its requests."""
    counts: dict[CounterHandle, int] = {}
    for account, count in zip(accounts, tokens, strict=True):
        counts[account] = counts.get(account, 0) + count
    total = sum(counts.values())
    return [(account, count / total) for account, count in counts.items()]
