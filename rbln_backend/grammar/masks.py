"""The grammar masks of a step, filled in a thread beside its forward pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from rbln_backend.grammar.late import MasksInTime
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.vllm_compat.grammar import (
    GrammarOutput,
    SchedulerOutput,
    StructuredOutputGrammar,
    StructuredOutputManager,
)
from rbln_backend.vllm_compat.surface import Request

MAX_WAIT_S = 0.02
"""Longest time that a step waits for masks after its forward pass."""
_THREADS = 4
"""One for the masks of the step under way; the others may be filling late ones."""


class _Filling:
    """The masks of one step, row by row.

    Fields change under the lock. ``cut`` ends it after the row that is being filled.
    """

    def __init__(
        self, names: list[str], masks: Tensor, fill: Callable[[str, Tensor, int], None]
    ) -> None:
        """``masks`` [len(names), words] int32; ``fill(name, masks, row)`` fills a row of it."""
        self.names, self.masks = names, masks
        self.future: Future[None]
        self._fill = fill
        self._lock = threading.Lock()
        self._done = 0
        self._is_filling = self._is_cut = False

    def run(self) -> None:
        """Fill the rows in order."""
        for row, name in enumerate(self.names):
            with self._lock:
                if self._is_cut:
                    return
                self._is_filling = True
            self._fill(name, self.masks, row)
            with self._lock:
                self._done, self._is_filling = row + 1, False

    def cut(self) -> tuple[int, bool]:
        """Begin no further row; return the number of rows filled, and if one is being filled."""
        with self._lock:
            self._is_cut = True
            return self._done, self._is_filling


class StepMasks:
    """Fills the masks of one step at a time; a slow one delays its own request only.

    The tokens before a step are known when it is scheduled, so that its masks can be. Kernels and
    the graph's thread let go of the interpreter's lock. Nothing else reads or advances a grammar
    between ``begin`` and ``take``, nor until a late mask is ready: all are calls of the engine's
    one thread.
    """

    def __init__(
        self,
        manager: StructuredOutputManager,
        requests: Mapping[str, Request],
        fill_all: Callable[[SchedulerOutput], GrammarOutput | None],
        board: MetricsBoard,
        *,
        may_be_late: bool,
    ) -> None:
        """``requests`` are the scheduler's; ``fill_all`` makes the masks of a step with drafts.

        ``may_be_late``: a step may run again for a request, with the same result.
        """
        self._manager, self._requests = manager, requests
        self._fill_all = fill_all
        self._may_be_late = may_be_late
        self._fill_seconds = board.histogram("rbln_grammar_mask_seconds", part="fill")
        self._wait_seconds = board.histogram("rbln_grammar_mask_seconds", part="wait")
        self._num_late = board.counter("rbln_grammar_masks_late_total")
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-masks")
        self._begun: tuple[SchedulerOutput, _Filling] | None = None
        self._held: dict[str, tuple[_Filling, int]] = {}
        """Masks that were late, by request, each with its row; they may still be being filled."""
        self._late: tuple[SchedulerOutput, Sequence[str]] | None = None

    def begin(self, output: SchedulerOutput) -> None:
        """Begin to fill the masks of a step that was just scheduled."""
        # Drafts may still be cut, and tokens of a step under way are not known.
        if not output.has_structured_output_requests or (
            output.pending_structured_output_tokens or output.scheduled_spec_decode_tokens
        ):
            return
        names = [name for name in output.num_scheduled_tokens if self._has_mask(name)]
        if names:
            assert self._manager.backend is not None
            masks = self._manager.backend.allocate_token_bitmask(len(names))
            filling = _Filling(names, masks, self._fill)
            filling.future = self._pool.submit(self._timed, filling)
            self._begun = output, filling

    def take(self, output: SchedulerOutput) -> GrammarOutput | None:
        """Return the masks of the step; fills them now if they were not begun.

        Waits for at most ``MAX_WAIT_S``, then leaves the rest to later steps, or without bound if
        a request of the step cannot be late.
        """
        started = time.perf_counter()
        begun, self._begun = self._begun, None
        if begun is None or begun[0] is not output:
            found = self._fill_all(output)
            if found is not None:
                took = time.perf_counter() - started
                self._fill_seconds.observe(took)
                self._wait_seconds.observe(took)
            return found
        masks = self._in_time(begun[1])
        if masks.late:
            self._num_late.inc(len(masks.late))
            self._late = output, masks.late
        self._wait_seconds.observe(time.perf_counter() - started)
        return masks

    def unready(self) -> set[str]:
        """Return the requests that no step can give a token, as their masks are being filled."""
        if not self._held:
            return set()
        for name in [name for name in self._held if name not in self._requests]:
            del self._held[name]
        return {name for name, (filling, _) in self._held.items() if not filling.future.done()}

    def wait_for_one(self, names: set[str]) -> None:
        """Wait until a mask of ``names`` is ready, for at most ``MAX_WAIT_S``."""
        ready = threading.Event()
        for name in names:
            self._held[name][0].future.add_done_callback(lambda _: ready.set())
        ready.wait(MAX_WAIT_S)

    def roll_back(self, output: SchedulerOutput) -> bool:
        """Let requests with late masks compute their token again; return False if there are none.

        Call it before the scheduler applies the result of the step ``output``.
        """
        late, self._late = self._late, None
        if late is None or late[0] is not output:
            return False
        for name in late[1]:
            request = self._requests.get(name)
            if request is not None and not request.is_finished():
                request.num_computed_tokens -= 1
        return True

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True)

    def _has_mask(self, name: str) -> bool:
        request = self._requests.get(name)
        if request is None:
            return False
        return request.use_structured_output and not request.is_prefill_chunk

    def _timed(self, filling: _Filling) -> None:
        started = time.perf_counter()
        filling.run()
        self._fill_seconds.observe(time.perf_counter() - started)

    def _fill(self, name: str, masks: Tensor, row: int) -> None:
        held = self._held.pop(name, None)
        if held is not None:
            filling, own = held
            filling.future.result()
            masks[row] = filling.masks[own]
            return
        request = self._requests.get(name)
        if request is None:
            return
        state = request.structured_output_request
        assert state is not None and isinstance(state.grammar, StructuredOutputGrammar)
        starts = self._manager._get_constraint_start(request, ())
        if starts == 0 and not state.grammar.is_terminated():
            state.grammar.fill_bitmask(masks, row)
        else:
            masks[row] = -1

    def _in_time(self, filling: _Filling) -> MasksInTime:
        names = filling.names
        try:
            filling.future.result(MAX_WAIT_S if self._can_be_late(names) else None)
            done = len(names)
        except TimeoutError:
            if filling.future.done():
                raise
            done, is_filling = filling.cut()
            if is_filling:
                self._held[names[done]] = filling, done
        return MasksInTime(names[:done], filling.masks[:done].numpy(), late=names[done:])

    def _can_be_late(self, names: Sequence[str]) -> bool:
        """Return whether the step of ``names`` may leave them without a token.

        vLLM delivers prompt log-probabilities with a token only.
        """
        requests = [self._requests.get(name) for name in names]
        params = [request.sampling_params for request in requests if request is not None]
        return self._may_be_late and not any(p and p.prompt_logprobs is not None for p in params)
