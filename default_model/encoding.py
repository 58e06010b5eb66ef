"""Dialogues as token ids, with the weight that each token has in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from default_model.corpus.dialogue import Dialogue
from default_model.paths import CHAT_TEMPLATE
from default_model.tokenizer import BOS_TOKEN, EOS_TOKEN, TURN_TOKEN, dump_json

# Answers are what is learnt; reading the questions along teaches what words go together.
PROMPT_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids, BOS first, and for each the weight that predicting it has in the loss."""

    ids: list[int]
    weights: list[float]


@cache
def _template() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = dump_json
    return environment.from_string(CHAT_TEMPLATE.read_text(encoding="utf-8"))


def render(messages: Any, tools: Any = (), *, asking: bool = False) -> str:
    """Return the text of a conversation as `transformers` renders it with the chat template."""
    return _template().render(
        messages=messages, tools=tools or None, bos_token=BOS_TOKEN, add_generation_prompt=asking
    )


def encode(tokenizer: Tokenizer, drawn: Dialogue | str) -> Sample:
    """Return the sample of a dialogue, whose answers count fully, or of plain text."""
    if isinstance(drawn, str):
        ids = tokenizer.encode(drawn + EOS_TOKEN).ids
        return Sample(ids, [1.0] * len(ids))
    text = render(drawn.messages, drawn.tools)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return Sample(ids, _answer_weights(tokenizer, ids))


def _answer_weights(tokenizer: Tokenizer, ids: list[int]) -> list[float]:
    turn, end = tokenizer.token_to_id(TURN_TOKEN), tokenizer.token_to_id(EOS_TOKEN)
    opening = [turn, *tokenizer.encode("assistant\n", add_special_tokens=False).ids]
    weights, answering, after = [], False, 0
    for index, token in enumerate(ids):
        if ids[index : index + len(opening)] == opening:
            answering, after = True, index + len(opening)
        weights.append(1.0 if answering and index >= after else PROMPT_WEIGHT)
        if token == end:
            answering = False
    return weights
