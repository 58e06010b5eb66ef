"""How much of each kind of text is trained on, and drawing it by a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from default_model.corpus import (
    arithmetic,
    extraction,
    labels,
    lists,
    memory,
    prose,
    records,
    tables,
    texts,
    tools,
    unknown,
    words,
)
from default_model.corpus.dialogue import Dialogue, Generator, decorate, is_held_back
from default_model.corpus.questions import topic

# Kind -> (weight, generator). The evaluation reports the same kinds.
KINDS: dict[str, tuple[float, Generator]] = {
    "small talk": (5, topic("smalltalk")),
    "about itself": (4, topic("about")),
    "the service": (12, topic("service")),
    "RBLN NPUs": (5, topic("hardware")),
    "vLLM and models": (6, topic("vllm")),
    "everyday": (8, topic("everyday")),
    "fact tables": (18, tables.draw),
    "yes or no": (1.5, tables.draw_yes_or_no),
    "sums": (8, arithmetic.draw_sum),
    "products": (4, arithmetic.draw_product),
    "several sums": (5, arithmetic.draw_several),
    "numbers": (4, arithmetic.draw_number),
    "lists": (5, lists.draw),
    "extraction": (9, extraction.draw),
    "one fact of a text": (2, extraction.draw_spoken),
    "countries as JSON": (3, records.draw_country),
    "objects as JSON": (3, records.draw_kind),
    "sentiment": (2, labels.draw_sentiment),
    "topic": (1, labels.draw_topic),
    "words": (10, texts.draw),
    "unknown": (3, unknown.draw),
    "tool calls": (12, tools.draw_call),
    "tool results": (3, tools.draw_result),
    "talk with tools": (3, tools.draw_talk),
}
# Kinds whose question may be put in lower case or into other words without changing the answer.
_DECORATED = frozenset(KINDS) - {
    "extraction",
    "one fact of a text",
    "several sums",
    "words",
    "tool calls",
    "tool results",
}
_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
    "Be helpful.", "Be kind.", "Answer briefly.", "You are a friendly assistant.",
    "Be brief and honest.",
    "You are the assistant of rbln-serve.",
    "You are a polite assistant that answers short questions.",
    "Help the user.", "Answer the question.",
)  # fmt: skip
_SINGLE = [kind for kind in KINDS if "tool" not in kind]


def draw_kind(kind: str, rng: Random, *, held_back: bool = False) -> Dialogue:
    """Draw a dialogue of `kind` whose question is held back for the evaluation, or is not."""
    generator = KINDS[kind][1]
    while True:
        dialogue = generator(rng)
        if is_held_back(dialogue) == held_back:
            break
    if held_back or kind not in _DECORATED:
        return dialogue
    return decorate(rng, dialogue)


def _draw_plain(rng: Random) -> Dialogue:
    """Draw a question that stands in any conversation: it needs no tools and no system message."""
    while True:
        kind = rng.choices(_SINGLE, weights=[KINDS[k][0] for k in _SINGLE])[0]
        dialogue = draw_kind(kind, rng)
        if dialogue.messages[0]["role"] != "system":
            return dialogue


def _conversation(rng: Random) -> Dialogue:
    """Several questions one after another: up to 40, so that long contexts are met too."""
    count = rng.choice((2, 2, 2, 3, 3, 4, 5)) if rng.random() < 0.98 else rng.randint(12, 40)
    turns = [m for _ in range(count) for m in _draw_plain(rng).messages]
    return Dialogue(tuple(turns))


_remember = memory.remembering(_draw_plain)


def _with_system(rng: Random, dialogue: Dialogue) -> Dialogue:
    if dialogue.messages[0]["role"] == "system" or rng.random() > 0.3:
        return dialogue
    content = rng.choice(_SYSTEMS)
    if rng.random() < 0.3:
        job, manner = rng.choice(words.words("jobs")), rng.choice(words.words("adjectives"))
        content = f"You are {words.name(rng)}, a {manner} {job}. {content}"
    return replace(dialogue, messages=({"role": "system", "content": content}, *dialogue.messages))


_WAYS: tuple[tuple[float, Callable[[Random], Dialogue | str]], ...] = (
    (0.64, lambda rng: draw_kind(rng.choices(list(KINDS), [w for w, _ in KINDS.values()])[0], rng)),
    (0.28, _conversation),
    (0.06, _remember),
    (0.02, prose.draw),
)


def draw(rng: Random) -> Dialogue | str:
    """Draw the next piece of training text: a dialogue, or plain prose."""
    way = rng.choices(_WAYS, weights=[weight for weight, _ in _WAYS])[0][1]
    drawn = way(rng)
    return drawn if isinstance(drawn, str) else _with_system(rng, drawn)
