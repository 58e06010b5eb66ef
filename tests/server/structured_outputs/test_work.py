"""A mask that takes too much work in the engine: the answer goes on byte by byte."""

from __future__ import annotations

import llguidance
import numpy as np
import pytest
import torch

from rbln_backend.grammar import lark
from rbln_backend.grammar.lark import LarkGrammar
from tests.server.structured_outputs.walks import grammar_of, vocabulary

PATTERN = "^[a-z ]*[a-m].{3,40}[a-z]$"
TEXT = '"the quick brown fox jumps over the lazy dog and then away"'


@pytest.fixture
def grammar(monkeypatch: pytest.MonkeyPatch) -> LarkGrammar:
    """Compile the pattern as the engine does, with a twentieth of the work for a mask."""
    limits = llguidance.LLParserLimits(step_lexer_fuel=10_000, verbose_errors=False)
    monkeypatch.setattr(lark, "_ENGINE_LIMITS", limits)
    compiler, tokenizer, _ = vocabulary()
    text = grammar_of({"type": "string", "pattern": PATTERN})
    return compiler.compile(text, {int(tokenizer.eos_token_id)}, in_trial=False)


def allowed(grammar: LarkGrammar) -> list[int]:
    """Return the tokens of the grammar's mask."""
    mask = torch.zeros((1, (len(vocabulary()[2]) + 31) // 32), dtype=torch.int32)
    grammar.fill_bitmask(mask, 0)
    bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def follow(grammar: LarkGrammar, text: str) -> list[int]:
    """Write a text with the longest tokens that each mask allows."""
    texts = vocabulary()[2]
    taken: list[int] = []
    while text:
        fits = [
            token for token in allowed(grammar) if texts[token] and text.startswith(texts[token])
        ]
        assert fits, (text, grammar.problem())
        taken.append(max(fits, key=lambda token: len(texts[token])))
        assert grammar.accept_tokens("request", taken[-1:])
        text = text.removeprefix(texts[taken[-1]])
    return taken


def test_an_answer_goes_on_byte_by_byte(grammar: LarkGrammar) -> None:
    _, tokenizer, texts = vocabulary()
    stop = int(tokenizer.eos_token_id)
    taken = follow(grammar, TEXT[:-4])
    assert grammar.by_bytes
    assert all(len(texts[token]) == 1 for token in taken[-20:])
    assert any(len(texts[token]) > 1 for token in taken)
    assert stop not in allowed(grammar)
    # Drafts are judged and tokens taken back as before.
    ends = [texts.index(character) for character in TEXT[-4:]]
    assert grammar.validate_tokens([*ends, stop]) == [*ends, stop]
    assert grammar.validate_tokens([texts.index("w"), texts.index("\n"), *ends]) == [ends[0]]
    assert grammar.accept_tokens("request", [*ends, stop]) and grammar.is_terminated()
    grammar.rollback(3)
    assert not grammar.is_terminated()
    assert grammar.accept_tokens("request", [*ends[-2:], stop]) and grammar.is_terminated()
    grammar.reset()
    assert len(follow(grammar, TEXT[:4])) < 4


def test_a_token_outside_is_no_work(grammar: LarkGrammar) -> None:
    assert not grammar.accept_tokens("request", [vocabulary()[2].index("x")])
    assert not grammar.by_bytes
