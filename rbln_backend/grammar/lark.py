"""Grammars in llguidance's dialect of Lark: compiled as they are walked, with their work counted.

A compile costs what the grammar's text costs, whatever the vocabulary: a string of at most 50,000
characters takes a millisecond. What a grammar may cost is counted in steps of the lexer and the
parser, not in seconds, so that a machine's load changes no verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import numpy.typing as npt
from torch import Tensor

from rbln_backend.vllm_compat.grammar import StructuredOutputGrammar, is_mistral_tokenizer

logger = logging.getLogger(__name__)

_STEP_LEXER = 200_000
_STEP_ITEMS = 50_000
_MARGIN = 4
"""How much more a step may cost in the engine than in the trial, whose walk is one of many."""


class LarkGrammar(StructuredOutputGrammar):
    """One grammar on its way; `stop` are the tokens that may end the answer."""

    def __init__(
        self, matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, stop: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._stop, self._ends = stop, tokenizer.eos_tokens
        self._row = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        self._ended = False

    def problem(self) -> str:
        """Return why it can no longer be followed, or nothing."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on by these tokens; what follows the end is ignored. False if one is not allowed."""
        for token in tokens:
            if self._ended:
                break
            if self._may_end(token):
                self._ended = True
            elif not self._matcher.consume_token(token):
                logger.error("request %s: token %d is outside of its grammar", request_id, token)
                return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return how far these tokens are allowed from here, without going on."""
        taken = 0
        for token in tokens:
            if self._may_end(token):
                self._matcher.rollback(taken)
                return tokens[: taken + 1]
            if token < 0 or not self._matcher.try_consume_tokens([token]):
                break
            taken += 1
        self._matcher.rollback(taken)
        return tokens[:taken]

    def rollback(self, num_tokens: int) -> None:
        """Go back by so many tokens."""
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        """Write the mask of the next token into that row of ``bitmask`` ([rows, V/32] int32)."""
        row = self._row
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        _set(row, self._ends, on=False)
        if self._matcher.is_accepting() or self._matcher.is_error():
            # After an error, which is logged, an answer ends rather than runs on.
            _set(row, self._stop, on=True)
        width = min(bitmask.shape[1], row.size)
        target = bitmask[batch_index].numpy()
        target[:width] = row[:width]
        target[width:] = 0
        if problem := self.problem():
            logger.error("a grammar cannot be followed further: %s", problem)

    def is_terminated(self) -> bool:
        """Whether a stop token was accepted."""
        return self._ended

    def reset(self) -> None:
        """Go back to the beginning."""
        self._matcher.reset()
        self._ended = False

    def _may_end(self, token: int) -> bool:
        return token in self._stop and self._matcher.is_accepting()


class LarkCompiler:
    """Compiles for one tokenizer and a vocabulary of `vocab_size`. Safe between threads."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = _wrapped(tokenizer, vocab_size)

    def compile(self, text: str, stop: set[int] | None, *, in_trial: bool) -> LarkGrammar:
        """Return a grammar at its beginning. Raises ValueError with llguidance's reason."""
        margin = 1 if in_trial else _MARGIN
        limits = llguidance.LLParserLimits(
            step_lexer_fuel=margin * _STEP_LEXER,
            step_max_items=margin * _STEP_ITEMS,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return LarkGrammar(matcher, self._tokenizer, frozenset(stop or self._tokenizer.eos_tokens))


def _wrapped(tokenizer: Any, vocab_size: int) -> llguidance.LLTokenizer:
    if is_mistral_tokenizer(tokenizer):
        wrapped: llguidance.LLTokenizer = tokenizer.llg_tokenizer
        return wrapped
    return llguidance.hf.from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)))


def _set(row: npt.NDArray[np.int32], tokens: Collection[int], *, on: bool) -> None:
    """Set or clear the bits of some tokens in a mask."""
    bits = row.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << (token & 31))
        if on:
            bits[token >> 5] |= bit
        else:
            bits[token >> 5] &= ~bit
