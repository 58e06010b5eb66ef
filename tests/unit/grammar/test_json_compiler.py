"""The vocabulary is read in the engine's first pause."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from rbln_backend.grammar import early as early_module
from rbln_backend.grammar.backend import PinnedXgrammar
from rbln_backend.grammar.early import EarlyVocabulary
from rbln_backend.grammar.json_compiler import tokens_without_controls


@pytest.fixture(autouse=True)
def short_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_module, "_START_S", 0.05)


class CountedBackend:
    """Counts how often its compiler is made; fails with `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_made = threading.Event()
        self._error = error

    def lark_compiler(self) -> None:
        self.is_made.set()
        if self._error is not None:
            raise self._error


def early(backend: CountedBackend, is_busy: threading.Event) -> EarlyVocabulary:
    return EarlyVocabulary(cast("PinnedXgrammar", backend), is_busy.is_set)


def test_a_busy_engine_reads_in_its_first_pause() -> None:
    backend, is_busy = CountedBackend(), threading.Event()
    is_busy.set()
    early(backend, is_busy)
    assert not backend.is_made.wait(0.3)
    is_busy.clear()
    assert backend.is_made.wait(5)


def test_a_start_ends_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_module, "_START_S", 0.6)
    backend = CountedBackend()
    early(backend, threading.Event())
    assert not backend.is_made.wait(0.4)
    assert backend.is_made.wait(5)


def test_a_closed_engine_reads_nothing() -> None:
    backend, is_busy = CountedBackend(), threading.Event()
    early(backend, is_busy).close()
    time.sleep(0.3)
    assert not backend.is_made.is_set()


@pytest.mark.filterwarnings("error")
def test_an_unreadable_tokenizer_fails_its_first_grammar_alone() -> None:
    backend = CountedBackend(ValueError("Only fast tokenizers are supported"))
    early(backend, threading.Event())
    assert backend.is_made.wait(5)
    for thread in threading.enumerate():
        if thread.name == "grammar-vocabulary":
            thread.join(5)


def test_tokens_with_control_characters_are_known() -> None:
    tokens = [b"a", b"\x00", b"b\n", b"\tc", b"", b"\x7f", "é".encode()] * 9
    for allowed in (b"\n", b"\n\r\t"):
        bits = tokens_without_controls(tokens, allowed)
        assert bits.nbytes == 8
        for index, token in enumerate(tokens):
            is_legal = all(byte >= 32 or byte in allowed for byte in token)
            assert bool(bits[index // 32] >> (index % 32) & 1) is is_legal
