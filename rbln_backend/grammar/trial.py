"""Compiles a grammar as the engine does and walks a few tokens through it.

A compiled grammar can still be unusable: it may allow no token, or its masks may be so slow that
they delay every running request. The walks find both. They run in a separate process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions

from rbln_backend.grammar.backend import MARK, pinned_backend
from rbln_backend.grammar.lark import LarkGrammar

_FIELDS = tuple(
    "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def heap_bytes() -> int | None:
    """Return the allocated bytes of all heaps; None without glibc 2.33 or later."""
    if (read := _reader()) is None:
        return None
    info = read()
    return int(info.uordblks) + int(info.hblkhd)


@functools.cache
def _reader() -> Callable[[], _Mallinfo] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    function.restype = _Mallinfo
    return function


_STEPS = 96
_PATTERN_STEPS = 96
"""Tokens walked through the patterns of a grammar together, each pattern for itself."""
_LEAST_PATTERN_STEPS, _MOST_PATTERN_STEPS = 4, 32
_KNOWN_WALKS = 4096
_MAX_WALK_S = 0.5
_MAX_MASK_S = 0.05
_MAX_LAST_MASK_S = 0.02
_MAX_BYTES = 64 << 20
"""Most memory of a compiled grammar and the states of its walk; the engine holds one per request.
"""
_WALKS = 3
"""Walks of a grammar that seems slow: the processor time of one on a busy machine varies."""
_PATTERN = re.compile(r'"pattern": ("(?:[^"\\]|\\.)*")')
"""A pattern in a schema of a grammar."""


class GrammarTrial:
    """Tries grammars for one model; not thread-safe."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        making: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`making()` is entered while xgrammar reads the vocabulary, which is no grammar's work."""
        self._backend = pinned_backend(vllm_config)
        self._backend.in_trial = True
        self._making = making
        self._mask = self._backend.allocate_token_bitmask(1)
        self._walked: set[tuple[int, str]] = set()
        self._most_bytes: int | None = None
        stop = getattr(self._backend.tokenizer, "eos_token_id", None)
        self._stop = None if stop is None else {int(stop)}

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of the tokenizer's special tokens by text; see `LarkCompiler`."""
        return self._backend.lark_compiler().special_tokens()

    def __call__(self, kind: str, text: str) -> list[str]:
        """Try one grammar; `kind` names a `StructuredOutputOptions`.

        Returns the backend's warnings: parts of the grammar that it ignores. Raises
        ValueError or RuntimeError with the reason when the grammar cannot be used, TimeoutError
        when its masks took too long.
        """
        with _native_stderr() as warnings:
            option = StructuredOutputOptions[kind.upper()]
            if self._backend.reads_vocabulary(option, text):
                with self._making():
                    self._backend.make()
            before = heap_bytes()
            grammar = self._backend.compile_grammar(option, text, self._stop)
            for walk in range(1, _WALKS + 1):
                try:
                    self._walk(grammar, _STEPS)
                    break
                except TimeoutError:
                    if walk == _WALKS:
                        raise
                    grammar.reset()
            self._note_bytes(before)
            if isinstance(grammar, LarkGrammar):
                self._walk_patterns(text)
        if warnings:
            # Only a compile warns, not a cache hit. Grammars without warnings stay cached, because
            # most schemas share parts.
            self._backend.forget()
        return warnings

    def take_bytes(self) -> int | None:
        """Return the most memory that a grammar took since the last call, in bytes.

        None if no grammar was walked, or if the C library does not report its heap.
        """
        found, self._most_bytes = self._most_bytes, None
        return found

    def _note_bytes(self, before: int | None) -> None:
        """Note the memory of the grammar just walked. Raises ValueError above `_MAX_BYTES`."""
        after = heap_bytes()
        if before is None or after is None:
            return
        taken = max(0, after - before)
        self._most_bytes = max(taken, self._most_bytes or 0)
        if taken > _MAX_BYTES:
            raise ValueError(
                f"it takes {taken >> 20} MiB of memory after {_STEPS} tokens; the limit is "
                f"{_MAX_BYTES >> 20} MiB"
            )

    def _walk_patterns(self, text: str) -> None:
        """Walk through each pattern of a grammar, since one path may miss some."""
        patterns = dict.fromkeys(_PATTERN.findall(text))
        steps = _PATTERN_STEPS // max(1, len(patterns))
        steps = min(_MOST_PATTERN_STEPS, max(_LEAST_PATTERN_STEPS, steps))
        for pattern in patterns:
            if (steps, pattern) in self._walked:
                continue
            part = f'{MARK} {{}}\nstart: %json {{"type": "string", "pattern": {pattern}}}\n'
            option = StructuredOutputOptions.GRAMMAR
            self._walk(self._backend.compile_grammar(option, part, self._stop), steps)
            if len(self._walked) < _KNOWN_WALKS:
                self._walked.add((steps, pattern))

    def _walk(self, grammar: StructuredOutputGrammar, steps: int) -> None:
        """Follow a path of random tokens with a fixed seed."""
        choose = random.Random(0)
        walked_s = 0.0
        for step in range(steps):
            if grammar.is_terminated():
                if not isinstance(grammar, LarkGrammar):
                    return
                grammar.reset()
            started = time.thread_time()
            grammar.fill_bitmask(self._mask, 0)
            mask_s = time.thread_time() - started
            if isinstance(grammar, LarkGrammar):
                # llguidance counts the steps of its own.
                if problem := grammar.problem():
                    raise ValueError(f"the mask of token {step + 1} takes too much work: {problem}")
            else:
                walked_s += mask_s
                _check_time(step, mask_s, walked_s)
            bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: self._backend.vocab_size])
            if allowed.size == 0:
                raise ValueError(
                    f"no token of the model's vocabulary can continue it after {step} tokens"
                )
            token = int(allowed[choose.randrange(allowed.size)])
            if not grammar.accept_tokens("trial", [token]):
                raise ValueError(f"it refuses a token that it allowed, after {step} tokens")


def _check_time(step: int, mask_s: float, walked_s: float) -> None:
    """Refuse a grammar whose mask, or masks so far, took more processor time than they may."""
    if walked_s > _MAX_WALK_S:
        raise TimeoutError(
            f"the masks of its first {step + 1} tokens take {walked_s:.2f} s of processor time, "
            f"and those of {_STEPS} may take {_MAX_WALK_S:g} s"
        )
    # Masks get slower along the path, and each delays every running request.
    limit = _MAX_LAST_MASK_S if step == _STEPS - 1 else _MAX_MASK_S
    if step and mask_s > limit:
        raise TimeoutError(
            f"the mask of token {step + 1} takes {mask_s:.3f} s of processor time; it may take "
            f"{limit:g} s"
        )


@contextmanager
def _native_stderr() -> Iterator[list[str]]:
    """Collect the lines that native code writes to stderr inside the block."""
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
