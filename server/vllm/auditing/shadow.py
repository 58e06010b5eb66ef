"""Shadow parity: a share of live answers is computed again in spare rows and compared.

Kernels are batch invariant, so that a greedy or seeded answer has the same tokens in any batch. A
difference means that the device, its driver or a stored graph computes wrongly while HTTP says 200.
Recomputed requests are background work: they use rows that would be padding and idle steps, are
charged to the account `shadow`, and are left out of vLLM's request statistics. Each has a salt of
its own, so that it reads no keys and values of the answer that it checks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rbln_backend.api.requests import BACKGROUND_PRIORITY, SHADOW, RequestAccount
from server.audit.writer import timestamp
from server.observability.shadow_counts import ShadowCounts, ShadowResult
from server.request.record import record_var
from server.vllm.auditing.answers import plain_params
from server.vllm.auditing.recompute import Recomputation, TokenDifference

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState

    from server.lora.adapter import Adapter
    from server.lora.registry import AdapterRegistry
    from server.vllm.engine_client import EngineClient

logger = logging.getLogger(__name__)

PREFIX = "shadow"
"""Begins the ids of recomputed requests; ids of clients' requests begin with their API's prefix."""
_CONCURRENCY = 4
_MAX_WAITING = 64
_MAX_WAITING_TOKENS = 1 << 18
"""Tokens of prompts and answers that wait: 2 MiB as lists of references."""
_TIMEOUT_S = 900.0
"""Longest time of a recomputation: under constant load there may be no spare row for it."""
_ENDED = ("stop", "length")


class _LiveAnswer(NamedTuple):
    """A sequence that the engine runs, or has ended."""

    request: EngineCoreRequest
    state: RequestState


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to compute again."""

    request: EngineCoreRequest
    answer_id: str
    output: list[int]

    @property
    def prompt(self) -> list[int]:
        return list(self.request.prompt_token_ids or ())

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids or ()) + len(self.output)


class ShadowParity:
    """Samples ended answers and compares their tokens. Used from the event loop only."""

    def __init__(
        self, rate: float, report: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        """`rate` is the share of answers from 0 to 1; `report` gets the record of a difference."""
        self._rate, self._report = rate, report
        self._running: dict[str, _LiveAnswer] = {}
        self._waiting: asyncio.Queue[_Answer] = asyncio.Queue()
        self._waiting_tokens = 0
        self._results: Counter[ShadowResult] = Counter()
        self._again: Recomputation | None = None
        self._adapters: AdapterRegistry | None = None
        self._workers: list[asyncio.Task[None]] = []

    def start(self, engine: EngineClient, adapters: AdapterRegistry | None) -> None:
        """Compute answers again on `engine` until `close`."""
        account = RequestAccount(SHADOW).as_args()
        self._again = Recomputation(
            *(engine, PREFIX), priority=BACKGROUND_PRIORITY, extra_args=account, is_salted=True
        )
        self._adapters = adapters
        self._workers = [asyncio.create_task(self._work()) for _ in range(_CONCURRENCY)]

    def close(self) -> None:
        """End the work; answers that wait are not compared."""
        for worker in self._workers:
            worker.cancel()

    def begin(self, request: EngineCoreRequest, state: RequestState) -> None:
        """Follow a client's sequence if it is in the sample and repeatable."""
        params = request.sampling_params
        if record_var.get() is None or params is None or not _is_repeatable(params):
            return
        if request.mm_features or request.prompt_embeds is not None:
            return
        if random.random() < self._rate:
            self._running[request.request_id] = _LiveAnswer(request, state)

    def end(self, request_ids: Iterable[str], reason: str) -> None:
        """Queue sampled sequences that have ended by themselves."""
        for request_id in request_ids:
            live = self._running.pop(request_id, None)
            if live is None or reason not in _ENDED or live.state.detokenizer is None:
                continue
            output = list(live.state.detokenizer.output_token_ids)
            answer = _Answer(live.request, live.state.external_req_id, output)
            fits = self._waiting_tokens + answer.num_tokens <= _MAX_WAITING_TOKENS
            if not output or not fits or self._waiting.qsize() >= _MAX_WAITING:
                self._results["dropped"] += 1
                continue
            self._waiting_tokens += answer.num_tokens
            self._waiting.put_nowait(answer)

    def end_all(self, _reason: str) -> None:
        """Forget the running sequences."""
        self._running.clear()

    def counts(self) -> ShadowCounts:
        """Return the compared answers by result, and those that wait."""
        return ShadowCounts(dict(self._results), self._waiting.qsize())

    async def _work(self) -> None:
        while True:
            answer = await self._waiting.get()
            self._waiting_tokens -= answer.num_tokens
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    result = await self._compare(answer)
            except Exception as error:  # noqa: BLE001
                # The boundary to the engine: a full queue or a failed request is no difference.
                logger.debug("Answer %s is not compared: %s", answer.answer_id, error)
                result = "dropped"
            self._results[result] += 1

    async def _compare(self, answer: _Answer) -> ShadowResult:
        assert self._again is not None
        request, leased = answer.request, None
        if request.lora_request is not None:
            leased = self._lease(request.lora_request.lora_name, request.lora_request.lora_int_id)
            if leased is None:
                return "dropped"
        assert request.sampling_params is not None
        params = plain_params(request.sampling_params)
        try:
            found = await self._again.difference(
                answer.prompt, params, answer.output, request.lora_request
            )
        finally:
            if leased is not None and self._adapters is not None:
                self._adapters.release(leased)
        if found is None:
            return "same"
        self._note(answer, found)
        return "different"

    def _lease(self, name: str, number: int) -> Adapter | None:
        """Return the adapter, None if it was unloaded or replaced."""
        leased = None if self._adapters is None else self._adapters.lease(name)
        if leased is not None and leased.id != number and self._adapters is not None:
            self._adapters.release(leased)
            return None
        return leased

    def _note(self, answer: _Answer, found: TokenDifference) -> None:
        adapter = answer.request.lora_request
        logger.error(
            "Shadow parity: answer %s differs at token %d of %d: live %s, again %s",
            *(answer.answer_id, found.position + 1, len(answer.output)),
            *(found.recorded, found.replayed),
        )
        if self._report is None:
            return
        replayed = found.replayed
        self._report(
            {
                "kind": "shadow",
                "time": timestamp(),
                "answer_id": answer.answer_id,
                "adapter": None if adapter is None else adapter.lora_name,
                "position": found.position,
                "tokens": len(answer.output),
                "live": found.recorded._asdict(),
                "again": None if replayed is None else replayed._asdict(),
            }
        )


def _is_repeatable(params: SamplingParams) -> bool:
    return params.temperature == 0 or params.seed is not None
