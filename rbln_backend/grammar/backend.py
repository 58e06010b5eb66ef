"""Grammar backend of an engine: xgrammar, and llguidance for schemas, compiled at low priority.

The engine and the HTTP server's trial processes use the same class, so that a grammar that passed
its trial compiles to the same grammar in the engine. The masks of a step are filled in a thread
beside its forward pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar
from vllm.v1.structured_output.utils import convert_lark_to_ebnf, grammar_is_likely_lark

from rbln_backend.host.processes import lower_thread_priority
from rbln_backend.reports.metrics import MetricsBoard

if TYPE_CHECKING:
    from rbln_backend.grammar.lark import LarkCompiler

MARK = "%llguidance"
"""Prefix of a grammar in llguidance's dialect."""
# Allowed control characters by kind of grammar; free text around tags may have tabs.
_CONTROLS = {
    StructuredOutputOptions.JSON: b"\n",
    StructuredOutputOptions.JSON_OBJECT: b"\n",
    StructuredOutputOptions.STRUCTURAL_TAG: b"\n\r\t",
}


@dataclass
class CleanGrammar(XgrammarGrammar):
    """A grammar without some of its tokens.

    JSON has no control characters, and text no special tokens, which answers do not show.
    """

    legal: Tensor = field(kw_only=True)
    """A bit per token ([V/32] int32), clear for forbidden tokens."""

    def fill_bitmask(self, bitmask: Tensor, idx: int) -> None:
        """Write the mask of the next token into row ``idx`` of ``bitmask`` ([rows, V/32])."""
        super().fill_bitmask(bitmask, idx)
        bitmask[idx] &= self.legal


class PinnedXgrammar(XgrammarBackend):
    """xgrammar backend with bounded whitespace, low-priority compiles and an llguidance dialect.

    The compiler is made at the first compile, in the compiling thread. Each compile uses one
    thread of low priority. Lark grammars are accepted with or without the rewriting by vLLM's
    validation. Grammars in llguidance's dialect, such as those of JSON schemas, go to llguidance.
    """

    in_trial = False
    """True in a trial process, where masks have tighter limits."""

    def __post_init__(self) -> None:
        self._making = threading.Lock()
        self._made = False
        self._legal: dict[bytes, Tensor] = {}
        self._lark: LarkCompiler | None = None

    def make(self) -> None:
        """Read the vocabulary once. Thread-safe."""
        with self._making:
            if self._made:
                return
            from rbln_backend.grammar.json_compiler import bounded_compiler, tokens_without_controls

            super().__post_init__()  # type: ignore[no-untyped-call]
            info = self.compiler.compile_grammar('root ::= "a"').tokenizer_info
            self.compiler = bounded_compiler(info, self.compiler.cache_limit_bytes)
            tokens = [*info.decoded_vocab[: self.vocab_size]]
            for allowed in set(_CONTROLS.values()):
                self._legal[allowed] = torch.from_numpy(tokens_without_controls(tokens, allowed))
            self._made = True

    def reads_vocabulary(self, request_type: StructuredOutputOptions, grammar_spec: str) -> bool:
        """Return whether a compile of this grammar calls ``make`` first: it is xgrammar's."""
        return not (
            request_type is StructuredOutputOptions.GRAMMAR and grammar_spec.startswith(MARK)
        )

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        """Compile one grammar; called in a compile thread, whose priority it lowers."""
        lower_thread_priority()
        if not self.reads_vocabulary(request_type, grammar_spec):
            return self.lark_compiler().compile(
                grammar_spec, stop_token_ids, in_trial=self.in_trial
            )
        self.make()
        if request_type is StructuredOutputOptions.GRAMMAR and grammar_is_likely_lark(grammar_spec):
            grammar_spec = convert_lark_to_ebnf(grammar_spec)
        grammar = super().compile_grammar(request_type, grammar_spec, stop_token_ids)
        assert isinstance(grammar, XgrammarGrammar)
        if request_type in _CONTROLS:
            legal = self._legal[_CONTROLS[request_type]]
        elif "Token(" not in grammar_spec:
            legal = self._texts(stop_token_ids)
        else:
            return grammar
        return CleanGrammar(
            vocab_size=grammar.vocab_size, matcher=grammar.matcher, ctx=grammar.ctx, legal=legal
        )

    def _texts(self, stop: set[int] | None) -> Tensor:
        """Return a bit per token ([V/32] int32), clear for special tokens that end no answer."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {token for token, entry in added.items() if entry.special}
        special -= stop or {self.tokenizer.eos_token_id}
        return torch.from_numpy(tokens_without(special, self.vocab_size))

    def lark_compiler(self) -> LarkCompiler:
        """Return the compiler of llguidance's dialect, which is made once. Thread-safe."""
        from rbln_backend.grammar.lark import LarkCompiler

        with self._making:
            if self._lark is None:
                self._lark = LarkCompiler(self.tokenizer, self.vocab_size)
            return self._lark

    def forget(self) -> None:
        if self._made:
            self.compiler.clear_cache()

    def destroy(self) -> None:
        if self._made:
            super().destroy()  # type: ignore[no-untyped-call]


def pinned_backend(vllm_config: VllmConfig) -> PinnedXgrammar:
    """Return a backend for the served model; cheap until its first compile."""
    model = vllm_config.model_config
    tokenizer = cached_tokenizer_from_config(model)
    return PinnedXgrammar(vllm_config, tokenizer=tokenizer, vocab_size=model.get_vocab_size())


def pin_backend(manager: StructuredOutputManager, vllm_config: VllmConfig) -> None:
    """Set this backend on the manager of an engine with grammars, before its first request.

    Its grammars begin behind the reasoning, which is read as the answer's is.
    """
    model = vllm_config.model_config
    if not model.skip_tokenizer_init and model.runner_type != "pooling":
        manager.backend = PinnedXgrammar(
            vllm_config, tokenizer=manager.tokenizer, vocab_size=model.get_vocab_size()
        )
        if manager.reasoner_cls is not None:
            # It imports vLLM's parsers, which a trial process does not need.
            from rbln_backend.grammar.reasoning import marked_reasoning

            manager.reasoner_cls = marked_reasoning(manager.reasoner_cls)  # type: ignore[arg-type]


def tokens_without(forbidden: Collection[int], size: int) -> npt.NDArray[np.int32]:
    """Return a bit for each of `size` tokens, set unless it is `forbidden`."""
    legal = np.ones((size + 31) // 32 * 32, dtype=np.uint8)
    legal[[token for token in forbidden if token < size]] = 0
    return np.packbits(legal, bitorder="little").view(np.int32)


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
        requests = ((name, self._requests.get(name)) for name in output.num_scheduled_tokens)
        names = [
            name
            for name, request in requests
            if request and request.use_structured_output and not request.is_prefill_chunk
        ]
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

    def get_end(self, request: Request, tokens: list[int]) -> int | None:
        """Return how many of the new `tokens` of a request with `ignore_eos` its grammar takes.

        None if the grammar does not end with them.
        """
        ends = self._withheld(request)
        if not ends:
            return None
        start = self._manager._get_constraint_start(request, tokens)
        return next((i + 1 for i in range(start, len(tokens)) if tokens[i] in ends), None)

    def close(self) -> None:
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

    def _fill(self, names: list[str]) -> GrammarOutput:
        started = time.perf_counter()
        assert self._manager.backend is not None
        masks = self._manager.backend.allocate_token_bitmask(len(names))
        for row, name in enumerate(names):
            request = self._requests.get(name)
            if request is None:
                continue
            state = request.structured_output_request
            assert state is not None and isinstance(state.grammar, StructuredOutputGrammar)
            starts = self._manager._get_constraint_start(request, ())
            if starts == 0 and not state.grammar.is_terminated():
                state.grammar.fill_bitmask(masks, row)
            else:
                masks[row] = -1
        self._fill_seconds.observe(time.perf_counter() - started)
        return GrammarOutput(names, masks.numpy())
