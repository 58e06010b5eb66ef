"""Words that an answer may not have are forbidden in every place of a text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.vllm.sampling import bad_word_ids
from tests.server.engine.test_open_characters import TOKENIZERS

WORDS = ("Paris", "the", "Rebellions", "a", "Ω", "\n- ", " the")
PLACES = ("{}", "x {}", "x\n{}", "x\n {}")


def wrapped(tokenizer: Tokenizer) -> Any:
    return SimpleNamespace(
        encode=lambda text, add_special_tokens: (
            tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        )
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_word_is_forbidden_in_every_place(name: str, word: str, place: str) -> None:
    tokenizer = TOKENIZERS[name]
    given = wrapped(tokenizer)
    text = place.format(word) if not word[:1].isspace() else f"x{word}"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    banned = bad_word_ids([word], given)
    assert any(
        ids[begin : begin + len(one)] == one for one in banned for begin in range(len(ids))
    ), (ids, banned)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_white_space_of_a_word_is_meant(name: str) -> None:
    given = wrapped(TOKENIZERS[name])
    plain = TOKENIZERS[name].encode("x- ", add_special_tokens=False).ids[1:]
    assert plain not in bad_word_ids(["\n- "], given)
