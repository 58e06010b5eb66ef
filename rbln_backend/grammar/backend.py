"""Grammar backend: xgrammar, and llguidance for schemas, compiled at low priority.

The engine and the HTTP server's trial processes use the same class, so that a grammar that passed
its trial compiles to the same grammar in the engine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar
from vllm.v1.structured_output.utils import convert_lark_to_ebnf, grammar_is_likely_lark

if TYPE_CHECKING:
    from rbln_backend.grammar.lark import LarkCompiler

MARK = "%llguidance"
"""Prefix of a grammar in llguidance's dialect."""
_NICENESS = 10
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
        _lower_priority()
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
        """Clear the cache of compiled grammars."""
        if self._made:
            self.compiler.clear_cache()

    def destroy(self) -> None:
        """Free the compiler, if there is one."""
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


def _lower_priority() -> None:
    """Lower the priority of this thread; Linux has one for each thread."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)


def tokens_without(forbidden: Collection[int], size: int) -> npt.NDArray[np.int32]:
    """Return a bit for each of `size` tokens, set unless it is `forbidden`."""
    legal = np.ones((size + 31) // 32 * 32, dtype=np.uint8)
    legal[[token for token in forbidden if token < size]] = 0
    return np.packbits(legal, bitorder="little").view(np.int32)
