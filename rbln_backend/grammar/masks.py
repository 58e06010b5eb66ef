"""The grammar masks of a step, filled in a thread beside its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rbln_backend.vllm_compat.grammar import GrammarOutput, SchedulerOutput

Fill = Callable[[SchedulerOutput], GrammarOutput | None]


class MasksBeside:
    """Fills the masks of one step at a time.

    The tokens before a step are known when it is scheduled, so that its masks can be. Kernels and
    the graph's thread let go of the interpreter's lock. Nothing else reads or advances a grammar
    between ``begin`` and ``take``: both are calls of the engine's one thread.
    """

    def __init__(self, fill: Fill) -> None:
        """``fill`` makes the masks of a scheduled step; None for a step without grammars."""
        self._fill = fill
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._begun: tuple[SchedulerOutput, Future[GrammarOutput | None]] | None = None

    def begin(self, output: SchedulerOutput) -> None:
        """Begin to fill the masks of a step that was just scheduled."""
        # Drafts may still be cut, and tokens of a step under way are not known.
        if output.has_structured_output_requests and not (
            output.pending_structured_output_tokens or output.scheduled_spec_decode_tokens
        ):
            self._begun = output, self._thread.submit(self._fill, output)

    def take(self, output: SchedulerOutput) -> GrammarOutput | None:
        """Return the masks of the step; waits for them, or fills them if they were not begun."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] is not output:
            return self._fill(output)
        return begun[1].result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
