"""Texts of pooling models, cut on the side that a request names, as transformers cuts them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from vllm.renderers import TokenizeParams

from server.vllm.patches import keep_special_tokens
from tests.checkpoint_tokenizer import train_tokenizer

pytestmark = pytest.mark.engine

QUERY, DOCUMENT = "which river is long", "one two three four five six seven " * 9


def tokenizer(side: str) -> Any:
    made = train_tokenizer()
    first, end = (str(made.id_to_token(token)) for token in (1, 3))
    made.post_processor = TemplateProcessing(
        single=f"{first} $A {end}",
        pair=f"{first} $A {end} $B:1 {end}:1",
        special_tokens=[(first, 1), (end, 3)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, truncation_side=side)


@pytest.mark.parametrize("most", [18, 40, -1, 300])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pair", [True, False])
def test_special_tokens_and_the_query_stay(
    side: str, most: int, pair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenizeParams, "get_encode_kwargs", TokenizeParams.get_encode_kwargs)
    texts = {"text": QUERY, "text_pair": DOCUMENT} if pair else {"text": DOCUMENT}
    theirs = tokenizer(side)(
        **texts,
        truncation="only_second" if pair else True,
        max_length=60 if most < 0 else most,
        return_token_type_ids=True,
    )
    # Another side of its own.
    ours = tokenizer("right" if side == "left" else "left")
    keep_special_tokens(ours)
    params = TokenizeParams(60 if most < 0 else 600, 0, None, most, side)  # type: ignore[arg-type]
    found = ours(**texts, return_token_type_ids=True, **params.get_encode_kwargs())
    assert found["input_ids"] == theirs["input_ids"]
    assert found["token_type_ids"] == theirs["token_type_ids"]


def test_a_long_query_is_cut_where_no_document_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenizeParams, "get_encode_kwargs", TokenizeParams.get_encode_kwargs)
    ours = tokenizer("right")
    keep_special_tokens(ours)
    params = TokenizeParams(600, 0, None, 9, "left")
    found = ours(text=DOCUMENT, text_pair="a", **params.get_encode_kwargs())["input_ids"]
    own = ours(DOCUMENT, add_special_tokens=False)["input_ids"]
    assert found == [1, *own[-6:], 3, 3]
