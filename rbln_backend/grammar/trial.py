"""Compiles a grammar as the engine would and walks a few tokens through it.

A grammar can compile and still be unusable: no token may be allowed, or each mask may take so long
that every running request waits for it. The walk finds both. It runs in a process of its own.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from rbln_backend.grammar.backend import pinned_backend
from rbln_backend.grammar.lark import LarkGrammar
from rbln_backend.vllm_compat.grammar import (
    StructuredOutputGrammar,
    StructuredOutputOptions,
    VllmConfig,
)

_STEPS = 96
_MAX_WALK_S = 0.5
_MAX_MASK_S = 0.02
_WALKS = 3
"""Walks of a grammar that seems slow: the processor time of one on a busy machine varies."""


class GrammarTrial:
    """Tries grammars for one model; not safe between threads."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._backend = pinned_backend(vllm_config)
        self._backend.in_trial = True
        self._backend.make()
        self._mask = self._backend.allocate_token_bitmask(1)
        stop = getattr(self._backend.tokenizer, "eos_token_id", None)
        self._stop = None if stop is None else {int(stop)}

    def __call__(self, kind: str, text: str) -> list[str]:
        """Try one grammar; `kind` names a `StructuredOutputOptions`.

        Returns what the backend warned of: parts of the grammar that it left out. Raises
        ValueError or RuntimeError with the reason when the grammar cannot be used, TimeoutError
        when its masks took too long.
        """
        with _told() as told:
            option = StructuredOutputOptions[kind.upper()]
            grammar = self._backend.compile_grammar(option, text, self._stop)
            self._walk_in_time(grammar)
        if told:
            # Warnings come with a compile, not with what is kept of one. Parts of grammars that
            # have none are kept, since most schemas share them.
            self._backend.forget()
        return told

    def _walk_in_time(self, grammar: StructuredOutputGrammar) -> None:
        for walk in range(1, _WALKS + 1):
            try:
                return self._walk(grammar)
            except TimeoutError:
                if walk == _WALKS:
                    raise
                grammar.reset()
        return None

    def _walk(self, grammar: StructuredOutputGrammar) -> None:
        """Follow one path of random tokens, always the same for a grammar."""
        choose = random.Random(0)
        walked_s = mask_s = 0.0
        for step in range(_STEPS):
            if grammar.is_terminated():
                return
            started = time.thread_time()
            grammar.fill_bitmask(self._mask, 0)
            mask_s = time.thread_time() - started
            walked_s += mask_s
            if isinstance(grammar, LarkGrammar):
                _check_work(grammar, step)
            elif walked_s > _MAX_WALK_S:
                raise TimeoutError(
                    f"the masks of its first {step + 1} tokens take {walked_s:.2f} s of processor "
                    f"time, and those of {_STEPS} may take {_MAX_WALK_S:g} s"
                )
            allowed = self._allowed()
            if allowed.size == 0:
                raise ValueError(
                    f"no token of the model's vocabulary can continue it after {step} tokens"
                )
            token = int(allowed[choose.randrange(allowed.size)])
            if not grammar.accept_tokens("trial", [token]):
                raise ValueError(f"it refuses a token that it allowed, after {step} tokens")
        if mask_s > _MAX_MASK_S and not isinstance(grammar, LarkGrammar):
            # They grow, and every running request waits for each.
            raise TimeoutError(
                f"the mask of token {_STEPS} takes {mask_s:.3f} s of processor time; it may take "
                f"{_MAX_MASK_S:g} s"
            )

    def _allowed(self) -> npt.NDArray[np.intp]:
        """Ids of the tokens that the mask allows."""
        bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._backend.vocab_size])


def _check_work(grammar: LarkGrammar, step: int) -> None:
    """Refuse a grammar whose mask took more of llguidance's steps than it may."""
    if problem := grammar.problem():
        raise ValueError(f"the mask of token {step + 1} takes too much work: {problem}")


@contextmanager
def _told() -> Iterator[list[str]]:
    """Collect the lines that native code writes to the process's stderr meanwhile."""
    lines: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
