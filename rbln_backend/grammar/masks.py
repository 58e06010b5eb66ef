"""The grammar masks of a step, filled in a thread beside its forward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from rbln_backend.grammar.backend import tokens_without
from rbln_backend.reports.metrics import MetricsBoard


class StepMasks:
    """Fills the masks of one step at a time.

    The tokens before a step are known when it is scheduled, so that its masks can be. Kernels and
    the graph's thread let go of the interpreter's lock. Nothing else reads or advances a grammar
    between ``begin`` and ``take``: all are calls of the engine's one thread.
    """

    def __init__(
        self,
        manager: StructuredOutputManager,
        requests: Mapping[str, Request],
        fill_all: Callable[[SchedulerOutput], GrammarOutput | None],
        board: MetricsBoard,
    ) -> None:
        """``requests`` are the scheduler's; ``fill_all`` makes the masks of a step with drafts."""
        self._manager, self._requests = manager, requests
        self._fill_all = fill_all
        self._fill_seconds = board.histogram("rbln_grammar_mask_seconds", part="fill")
        self._wait_seconds = board.histogram("rbln_grammar_mask_seconds", part="wait")
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._begun: tuple[SchedulerOutput, Future[GrammarOutput]] | None = None

    def begin(self, output: SchedulerOutput) -> None:
        """Begin to fill the masks of a step that was just scheduled."""
        # Drafts may still be cut, and tokens of a step under way are not known.
        if not output.has_structured_output_requests or (
            output.pending_structured_output_tokens or output.scheduled_spec_decode_tokens
        ):
            return
        names = [name for name in output.num_scheduled_tokens if self._has_mask(name)]
        if names:
            self._begun = output, self._pool.submit(self._fill, names)

    def take(self, output: SchedulerOutput) -> GrammarOutput | None:
        """Return the masks of the step; fills them now if they were not begun."""
        started = time.perf_counter()
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] is output:
            found: GrammarOutput | None = begun[1].result()
        else:
            found = self._fill_all(output)
            if found is not None:
                self._fill_seconds.observe(time.perf_counter() - started)
        if found is None:
            return None
        self._withhold_ends(found, output)
        self._wait_seconds.observe(time.perf_counter() - started)
        return found

    def end_of(self, request: Request, tokens: list[int]) -> int | None:
        """Return how many of the new `tokens` of a request with `ignore_eos` its grammar takes.

        None if the grammar does not end with them.
        """
        ends = self._withheld(request)
        if not ends:
            return None
        start = self._manager._get_constraint_start(request, tokens)
        return next((i + 1 for i in range(start, len(tokens)) if tokens[i] in ends), None)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=True)

    def _withhold_ends(self, found: GrammarOutput, output: SchedulerOutput) -> None:
        """Allow the end of an answer with `ignore_eos` only where nothing else may follow."""
        row = 0
        for name in found.structured_output_request_ids:
            rows = range(row, row + 1 + len(output.scheduled_spec_decode_tokens.get(name, ())))
            row = rows.stop
            if ends := self._withheld(self._requests.get(name)):
                legal = tokens_without(ends, 32 * found.grammar_bitmask.shape[1])
                for index in rows:
                    mask = found.grammar_bitmask[index] & legal
                    # Before its grammar, and after, an answer is free.
                    if mask.any() and not (found.grammar_bitmask[index] == -1).all():
                        found.grammar_bitmask[index] = mask

    @staticmethod
    def _withheld(request: Request | None) -> set[int]:
        """Return the tokens that end the grammar, but not the answer."""
        if request is None or not request.use_structured_output:
            return set()
        params = request.sampling_params
        if params is None or not params.ignore_eos:
            return set()
        return set(params.all_stop_token_ids).difference(params.stop_token_ids or ())

    def _has_mask(self, name: str) -> bool:
        request = self._requests.get(name)
        if request is None:
            return False
        return request.use_structured_output and not request.is_prefill_chunk

    def _fill(self, names: list[str]) -> GrammarOutput:
        started = time.perf_counter()
        assert self._manager.backend is not None
        masks = self._manager.backend.allocate_token_bitmask(len(names))
        for row, name in enumerate(names):
            self._fill_row(name, masks, row)
        self._fill_seconds.observe(time.perf_counter() - started)
        return GrammarOutput(names, masks.numpy())

    def _fill_row(self, name: str, masks: Tensor, row: int) -> None:
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
