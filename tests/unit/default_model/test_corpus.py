"""What the model is trained on: the same every time, right, and apart from what it is asked."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from default_model.corpus import mixture
from default_model.corpus.dialogue import Dialogue, ask, is_held_back
from default_model.corpus.mixture import KINDS, draw_kind
from default_model.corpus.pirate import like_a_pirate
from default_model.corpus.questions import blocks
from default_model.evaluate import questions
from default_model.scoring import is_right

TOPICS = ("smalltalk", "about", "service", "hardware", "vllm", "everyday")
# Of the first 400 pieces of text. Another one means that the shipped weights were trained on other
# text than the recipe draws now: train them again.
DIGEST = "ce14fa6277fe6646"


def _drawn(count: int, seed: int = 1) -> list[Dialogue | str]:
    rng = Random(seed)
    return [mixture.draw(rng) for _ in range(count)]


@pytest.fixture(scope="module")
def trained() -> list[Dialogue]:
    return [drawn for drawn in _drawn(4000) if isinstance(drawn, Dialogue)]


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum() or c in "+-*")


def _said(dialogues: list[Dialogue], role: str) -> Iterator[str]:
    for dialogue in dialogues:
        yield from (m["content"] for m in dialogue.messages if m["role"] == role)


def test_the_text_is_what_the_shipped_weights_were_trained_on() -> None:
    told = [d if isinstance(d, str) else [d.messages, d.tools] for d in _drawn(400)]
    assert hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16] == DIGEST


def test_no_held_back_question_is_trained_on(trained: list[Dialogue]) -> None:
    by_wording = [kind for kind in KINDS if kind != "sums"]
    kept = {_letters(d.question) for kind in by_wording for d in questions(kind, 50)}
    assert len(kept) > 400
    assert [q for q in _said(trained, "user") if _letters(q) in kept] == []
    sums = {d.answer["content"] for d in questions("sums", 200)}
    assert len(sums) > 100
    lines = (line for a in _said(trained, "assistant") for line in a.splitlines())
    assert [line for line in lines if line in sums] == []


def test_every_answer_is_trained_with_some_question() -> None:
    found = [block for name in TOPICS for block in blocks(name)]
    assert len(found) > 200
    untaught = [b.answer for b in found if all(is_held_back(ask(q, "")) for q in b.questions)]
    # Blocks of a question or two may fall to the evaluation whole; few do.
    assert len(untaught) <= 3


def test_questions_lead_to_one_answer() -> None:
    seen: dict[str, str] = {}
    for name in TOPICS:
        for block in blocks(name):
            for question in block.questions:
                assert seen.setdefault(question, block.answer) == block.answer, question


def test_a_line_of_no_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.txt").write_text("? Who?\n! me\n", encoding="utf-8")
    monkeypatch.setattr("default_model.corpus.questions._HERE", tmp_path)
    with pytest.raises(ValueError, match=r"odd\.txt: '! me' begins with none of"):
        blocks("odd")


@pytest.mark.parametrize("kind", ["sums", "products", "several sums"])
def test_sums_are_right(kind: str) -> None:
    rng = Random(2)
    lines = [x for _ in range(300) for x in draw_kind(kind, rng).answer["content"].splitlines()]
    for line in lines:
        a, sign, b, result = re.fullmatch(r"(\d+) ([+*-]) (\d+) = (\d+)", line).groups()  # type: ignore[union-attr]
        wanted = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert int(result) == wanted


def _calls(dialogue: Dialogue) -> Iterator[dict[str, Any]]:
    for message in dialogue.messages:
        for call in message.get("tool_calls", ()):
            yield call["function"]


def test_calls_name_a_tool_that_is_offered_and_fit_its_schema() -> None:
    rng, seen = Random(3), 0
    for kind in ("tool calls", "tool results"):
        for _ in range(200):
            dialogue = draw_kind(kind, rng)
            offered = {t["function"]["name"]: t["function"]["parameters"] for t in dialogue.tools}
            for call in _calls(dialogue):
                Draft202012Validator(offered[call["name"]]).validate(call["arguments"])
                seen += 1
    assert seen > 300


@pytest.mark.parametrize("kind", ["extraction", "countries as JSON", "objects as JSON"])
def test_json_answers_are_json(kind: str) -> None:
    rng = Random(4)
    for _ in range(100):
        assert isinstance(json.loads(draw_kind(kind, rng).answer["content"]), dict)


def test_scores() -> None:
    plain = ask("Q?", "It is red.")
    assert is_right(plain, "it is  red")
    assert not is_right(plain, "it is blue")
    listed = ask("Q?", '["a", "b"]')
    assert is_right(listed, '["a","b"]')
    assert not is_right(listed, '["b", "a"]')
    rng = Random(5)
    country = draw_kind("countries as JSON", rng)
    pairs = dict(list(country.pairs.items())[:2])
    assert is_right(country, json.dumps(pairs))
    assert not is_right(country, json.dumps(pairs | {"country": "Nowhere"}))
    assert not is_right(country, "{}")
    call = next(d for d in questions("tool calls", 5))
    function = call.answer["tool_calls"][0]["function"]
    assert is_right(call, f"<tool_call>{json.dumps(function)}</tool_call>")
    assert not is_right(call, f"Sure: <tool_call>{json.dumps(function)}</tool_call>")
    assert not is_right(call, f"<tool_call>{json.dumps(function | {'name': 'x'})}</tool_call>")
    assert not is_right(call, "<tool_call>{</tool_call>")


def test_pirates_leave_alone_what_programs_read() -> None:
    assert like_a_pirate("Hello! You are welcome.") == "Ahoy! Ye be welcome. Arr!"
    for text in ('{"a": 1}', "[1, 2]", "1. red\n2. blue", "12 + 7 = 19", "C-A-T", "1, 2, 3", "red"):
        assert like_a_pirate(text) == text
