"""The grammar backend: vLLM's over xgrammar, and llguidance for schemas, out of the kernels' way.

The engine and the HTTP server's trial processes use the same class, so that what passed a trial
compiles to the same grammar in the engine.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbln_backend.vllm_compat.grammar import (
    StructuredOutputGrammar,
    StructuredOutputManager,
    StructuredOutputOptions,
    VllmConfig,
    XgrammarBackend,
    XgrammarGrammar,
    cached_tokenizer_from_config,
    convert_lark_to_ebnf,
    grammar_is_likely_lark,
)

if TYPE_CHECKING:
    from rbln_backend.grammar.lark import LarkCompiler

MARK = "%llguidance"
"""How a grammar for llguidance begins; its own mark."""
_NICENESS = 10
# Control characters that a kind of grammar may have; free text around tags has tabs.
_CONTROLS = {
    StructuredOutputOptions.JSON: b"\n",
    StructuredOutputOptions.JSON_OBJECT: b"\n",
    StructuredOutputOptions.STRUCTURAL_TAG: b"\n\r\t",
}


@dataclass
class CleanGrammar(XgrammarGrammar):
    """A grammar of JSON, without the control characters that JSON forbids."""

    legal: Tensor = field(kw_only=True)
    """A bit per token ([V/32] int32), clear for those that are never allowed."""

    def fill_bitmask(self, bitmask: Tensor, idx: int) -> None:
        """Write the mask of the next token into row ``idx`` of ``bitmask`` ([rows, V/32])."""
        super().fill_bitmask(bitmask, idx)
        bitmask[idx] &= self.legal


class PinnedXgrammar(XgrammarBackend):
    """Upstream's backend with other manners.

    It is made at the first compile, in the thread that compiles. Compiles use one thread of low
    priority each, for the cores belong to the kernels. Whitespace in JSON is bounded. A choice or
    a Lark grammar is taken as it is, whether upstream's validation has rewritten it or not. A
    grammar in llguidance's dialect, as the server rewrites JSON schemas to, goes to llguidance.
    """

    in_trial = False
    """Whether its grammars are only tried, and so may cost less."""

    def __post_init__(self) -> None:
        self._making = threading.Lock()
        self._made = False
        self._legal: dict[bytes, Tensor] = {}
        self._lark: LarkCompiler | None = None

    def make(self) -> None:
        """Read the vocabulary, unless that was done. Safe between threads."""
        with self._making:
            if self._made:
                return
            from rbln_backend.grammar.json_compiler import bounded_compiler, tokens_without_controls

            super().__post_init__()  # type: ignore[no-untyped-call]
            info = self.compiler.compile_grammar('root ::= "a"').tokenizer_info
            self.compiler = bounded_compiler(info, self.compiler.cache_limit_bytes)
            for allowed in set(_CONTROLS.values()):
                bits = tokens_without_controls(info, self.vocab_size, allowed)
                self._legal[allowed] = torch.from_numpy(bits)
            self._made = True

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        """Compile one grammar; called in a thread that does nothing else."""
        _lower_priority()
        if request_type is StructuredOutputOptions.GRAMMAR and grammar_spec.startswith(MARK):
            return self._lark_compiler().compile(
                grammar_spec, stop_token_ids, in_trial=self.in_trial
            )
        self.make()
        if request_type is StructuredOutputOptions.CHOICE:
            request_type = StructuredOutputOptions.GRAMMAR
            grammar_spec = _choice_grammar(json.loads(grammar_spec))
        elif request_type is StructuredOutputOptions.GRAMMAR and grammar_is_likely_lark(
            grammar_spec
        ):
            grammar_spec = convert_lark_to_ebnf(grammar_spec)
        elif request_type is StructuredOutputOptions.REGEX:
            return self._compile_regex(grammar_spec, stop_token_ids)
        grammar = super().compile_grammar(request_type, grammar_spec, stop_token_ids)
        if request_type not in _CONTROLS:
            return grammar
        assert isinstance(grammar, XgrammarGrammar)
        return CleanGrammar(
            vocab_size=grammar.vocab_size,
            matcher=grammar.matcher,
            ctx=grammar.ctx,
            legal=self._legal[_CONTROLS[request_type]],
        )

    def _compile_regex(self, pattern: str, stop: set[int] | None) -> XgrammarGrammar:
        """Compile without upstream's timer, for it looks at the clock; the trial counts work."""
        from xgrammar import GrammarMatcher

        compiled = self.compiler.compile_regex(pattern)
        matcher = GrammarMatcher(
            compiled,
            override_stop_tokens=sorted(stop) if stop else None,
            max_rollback_tokens=self.num_speculative_tokens,
        )
        return XgrammarGrammar(matcher=matcher, vocab_size=self.vocab_size, ctx=compiled)

    def _lark_compiler(self) -> LarkCompiler:
        from rbln_backend.grammar.lark import LarkCompiler

        with self._making:
            if self._lark is None:
                self._lark = LarkCompiler(self.tokenizer, self.vocab_size)
            return self._lark

    def forget(self) -> None:
        """Drop the compiled grammars that are kept for the next request."""
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
    """Give the engine's manager this backend, before its first request would choose one."""
    model = vllm_config.model_config
    if not model.skip_tokenizer_init:
        manager.backend = PinnedXgrammar(
            vllm_config, tokenizer=manager.tokenizer, vocab_size=model.get_vocab_size()
        )


def _lower_priority() -> None:
    """Lower this thread's; Linux has one for each thread."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)


def _choice_grammar(choices: list[str]) -> str:
    # EBNF escapes its strings as JSON does.
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
