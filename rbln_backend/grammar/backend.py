"""Grammar backend: xgrammar, and llguidance for schemas, compiled at low priority.

The engine and the HTTP server's trial processes use the same class, so that a grammar that passed
its trial compiles to the same grammar in the engine.
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
    """A grammar of JSON, without the control characters that JSON forbids."""

    legal: Tensor = field(kw_only=True)
    """A bit per token ([V/32] int32), clear for forbidden tokens."""

    def fill_bitmask(self, bitmask: Tensor, idx: int) -> None:
        """Write the mask of the next token into row ``idx`` of ``bitmask`` ([rows, V/32])."""
        super().fill_bitmask(bitmask, idx)
        bitmask[idx] &= self.legal


class PinnedXgrammar(XgrammarBackend):
    """xgrammar backend with bounded whitespace, low-priority compiles and an llguidance dialect.

    The compiler is made at the first compile, in the compiling thread. Each compile uses one
    thread of low priority. Choices and Lark grammars are accepted with or without the rewriting by
    vLLM's validation. Grammars in llguidance's dialect, such as those of JSON schemas, go to
    llguidance.
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
        """Compile without vLLM's time limit, which depends on the load; the trial limits work."""
        from xgrammar import GrammarMatcher

        compiled = self.compiler.compile_regex(pattern)
        matcher = GrammarMatcher(
            compiled,
            override_stop_tokens=sorted(stop) if stop else None,
            max_rollback_tokens=self.num_speculative_tokens,
        )
        return XgrammarGrammar(matcher=matcher, vocab_size=self.vocab_size, ctx=compiled)

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

            manager.reasoner_cls = marked_reasoning(manager.reasoner_cls)


def _lower_priority() -> None:
    """Lower the priority of this thread; Linux has one for each thread."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)


def _choice_grammar(choices: list[str]) -> str:
    # EBNF escapes its strings as JSON does.
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
