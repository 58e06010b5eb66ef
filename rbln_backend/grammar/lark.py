"""Grammars in llguidance's dialect of Lark: compiled as they are walked, with their work counted.

Compile time does not depend on the vocabulary: `maxLength: 50000` takes a millisecond. The limit
of a mask is in steps of the lexer and the parser, not in seconds, so that a machine's load changes
no verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
from torch import Tensor
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

logger = logging.getLogger(__name__)

_ENGINE_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=60_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=250_000,
    verbose_errors=False,
)
_TRIAL_LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=30_000,
    step_max_items=20_000,
    max_items_in_row=1_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
"""Tighter than the engine's, because a trial walks few of a grammar's paths."""
_LONGEST = 32
"""Bytes of a token that spells forced text."""
_TOO_MUCH_WORK = ("too many", "max is")
"""Parts of llguidance's errors about its limits; their stop reason is InternalError alone."""


class LarkGrammar(StructuredOutputGrammar):
    """State of one grammar; `stop` are the tokens that may end the answer.

    Where a mask takes more work than it may, the answer goes on byte by byte: the grammar that
    `again` compiles is brought to the same place, and from there on the mask has tokens of one byte
    only, each of which is tried. Without `again` the grammar fails.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        again: Callable[[], llguidance.LLMatcher] | None,
        vocabulary: Vocabulary,
        stop: frozenset[int],
    ) -> None:
        self._matcher, self._again = matcher, again
        self._vocabulary, self._stop = vocabulary, stop
        self._row = np.zeros((vocabulary.tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        self._address = self._row.ctypes.data
        self._stop_bits = _bits(stop)
        self._taken: list[int] = []
        self._restarted_at: int | None = None
        self._ended = False

    @property
    def by_bytes(self) -> bool:
        """True if the masks have tokens of one byte only."""
        return self._restarted_at is not None

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
            elif not self._take(token):
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
            # A stop token is no text: its mask forbids it before the end.
            if token < 0 or token in self._stop or not self._matcher.try_consume_tokens([token]):
                break
            taken += 1
        if not self._restart():
            self._matcher.rollback(taken)
        return tokens[:taken]

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            del self._taken[-num_tokens:]

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        """Write the mask of the next token into that row of ``bitmask`` ([rows, V/32] int32)."""
        row = self._row
        if not self.by_bytes:
            self._matcher.unsafe_compute_mask_ptr(self._address, row.nbytes)
            if self._matcher.is_error():
                self._restart()
        if self.by_bytes:
            self._fill_with([t for t in self._vocabulary.of_one_byte if self._allows(t)])
        for word, bit in (*self._vocabulary.end_bits, *self._stop_bits):
            row[word] &= ~bit
        failed = self._matcher.is_error()
        if failed or self._matcher.is_accepting():
            # After an error, which is logged, an answer ends rather than runs on.
            for word, bit in self._stop_bits:
                row[word] |= bit
        elif not row.any() or self._forces_special():
            self._fill_with(self._spellings())
        width = min(bitmask.shape[1], row.size)
        target = bitmask[batch_index].numpy()
        target[:width] = row[:width]
        target[width:] = 0
        if failed:
            logger.error("a grammar cannot be followed further: %s", self.problem())

    def _forces_special(self) -> bool:
        """Return True if the mask has a special token where the grammar has its text."""
        (words,) = np.nonzero(self._row & self._vocabulary.special_row)
        if not words.size:
            return False
        bits = int(self._row[words[0]] & self._vocabulary.special_row[words[0]])
        token = 32 * int(words[0]) + (bits & -bits).bit_length() - 1
        return not self._matcher.validate_tokens([token])

    def _spellings(self) -> list[int]:
        """Return tokens that spell forced text without special and stop tokens.

        llguidance 1.7.6 allows one spelling. It may have special tokens, which its parser rejects.
        """
        forced = self._matcher.compute_ff_bytes()[:_LONGEST]
        encode = self._vocabulary.tokenizer.tokenize_bytes
        starts = [encode(forced[:size]) for size in range(1, len(forced) + 1)]
        tokens = {*self._vocabulary.of_one_byte, *(start[0] for start in starts if len(start) == 1)}
        return [token for token in tokens - self._stop if self._allows(token)]

    def _fill_with(self, tokens: Collection[int]) -> None:
        self._row.fill(0)
        for word, bit in _bits(tokens):
            self._row[word] |= bit

    def _allows(self, token: int) -> bool:
        if self._matcher.validate_tokens([token]):
            return True
        return self._restart() and bool(self._matcher.validate_tokens([token]))

    def _take(self, token: int) -> bool:
        taken = self._matcher.consume_token(token)
        if not taken and self._restart():
            taken = self._matcher.consume_token(token)
        if taken:
            self._taken.append(token)
        return bool(taken)

    def _restart(self) -> bool:
        """Compile again if the work was too much, at most once after each token.

        Returns False if it was not, or is too much from there as well.
        """
        problem = self.problem()
        if self._again is None or not any(part in problem for part in _TOO_MUCH_WORK):
            return False
        if self._restarted_at == len(self._taken):
            return False
        logger.warning(
            "a grammar took more work than a mask may after %d tokens (%s); its answer goes on in "
            "tokens of one byte",
            len(self._taken),
            problem.strip(),
        )
        self._restarted_at = len(self._taken)
        self._matcher = self._again()
        return bool(self._matcher.consume_tokens(self._taken))

    def is_terminated(self) -> bool:
        return self._ended

    def reset(self) -> None:
        self._matcher.reset()
        self._taken.clear()
        self._restarted_at = None
        self._ended = False

    def _may_end(self, token: int) -> bool:
        return token in self._stop and self._matcher.is_accepting()


class Vocabulary:
    """A tokenizer of `vocab_size` tokens, and those of its tokens that are a single byte.

    `end_bits` are those of its end tokens in a mask, `special_row` is the mask of all special
    tokens ([V/32] int32).
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer: llguidance.LLTokenizer
        if is_mistral_tokenizer(tokenizer):
            self.tokenizer = tokenizer.llg_tokenizer
        else:
            size = max(vocab_size, len(tokenizer))
            self.tokenizer = llguidance.hf.from_tokenizer(tokenizer, size)
        self.size = min(len(tokenizer), self.tokenizer.vocab_size)
        self.end_bits = _bits(self.tokenizer.eos_tokens)
        tokens = range(self.tokenizer.vocab_size)
        special = {token for token in tokens if self.tokenizer.is_special_token(token)}
        self.of_one_byte = [
            token
            for token in tokens
            if len(self.tokenizer.decode_bytes([token])) == 1 and token not in special
        ]
        self.special_row = np.zeros((len(tokens) + 31) // 32, dtype=np.int32)
        for word, bit in _bits(special):
            self.special_row[word] |= bit


class LarkCompiler:
    """Compiles for one tokenizer and a vocabulary of `vocab_size`. Safe between threads."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.vocabulary = Vocabulary(tokenizer, vocab_size)
        """The tokens that grammars are compiled for."""

    def special_tokens(self) -> dict[str, int]:
        """Return the ids by text of the tokens that a grammar must name, without stop tokens."""
        tokenizer = self.vocabulary.tokenizer
        ends = set(tokenizer.eos_tokens)
        found = {
            tokenizer.decode_str([token]): token
            for token in range(self.vocabulary.size)
            if tokenizer.is_special_token(token) and token not in ends
        }
        # A token of the byte 0xFF counts as special, too.
        return {text: token for text, token in found.items() if text}

    def compile(self, text: str, stop: set[int] | None, *, in_trial: bool) -> LarkGrammar:
        """Return a grammar at its beginning. Raises ValueError with llguidance's reason."""
        limits = _TRIAL_LIMITS if in_trial else _ENGINE_LIMITS
        tokenizer = self.vocabulary.tokenizer

        def matcher() -> llguidance.LLMatcher:
            # A copy would share the lexer and with it what was counted.
            return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)

        first = matcher()
        if first.is_error():
            raise ValueError(first.get_error())
        ends = frozenset(stop or tokenizer.eos_tokens)
        return LarkGrammar(first, None if in_trial else matcher, self.vocabulary, ends)


def _bits(tokens: Collection[int]) -> list[tuple[int, np.int32]]:
    """Return the index and the bit of each token in a mask."""
    bits = np.uint32(1) << (np.array(list(tokens), dtype=np.uint32) & 31)
    words = [token >> 5 for token in tokens]
    return list(zip(words, bits.view(np.int32), strict=True))
