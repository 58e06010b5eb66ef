"""Answers under a schema. Random models finish some of them by chance; what finishes must fit."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

HI: list[Any] = [{"role": "user", "content": "Answer in JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "lit": {"type": "boolean"},
        "size": {"enum": [1, 2, 3]},
    },
    "required": ["color", "lit", "size"],
    "additionalProperties": False,
}
FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "lamp", "schema": SCHEMA, "strict": True},
}


class Lamp(pydantic.BaseModel):
    color: Literal["red", "green"]
    lit: bool


def finished(client: openai.OpenAI, model: str, **wish: Any) -> str:
    """The first answer of some seeds that was not cut off."""
    for seed in range(6):
        answer = client.chat.completions.create(
            model=model, messages=HI, max_tokens=96, temperature=1.5, seed=seed, **wish
        )
        if answer.choices[0].finish_reason == "stop":
            return str(answer.choices[0].message.content)
    pytest.fail("no answer was finished within 96 tokens, for 6 seeds")


def test_a_schema_is_kept(client: openai.OpenAI, model: str) -> None:
    jsonschema.validate(json.loads(finished(client, model, response_format=FORM)), SCHEMA)


def test_a_schema_is_kept_in_a_stream(client: openai.OpenAI, model: str) -> None:
    for seed in range(6):
        chunks = list(
            client.chat.completions.create(  # type: ignore[call-overload]
                model=model,
                messages=HI,
                max_tokens=96,
                temperature=1.5,
                seed=seed,
                response_format=FORM,
                stream=True,
            )
        )
        if chunks[-1].choices[0].finish_reason == "stop":
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            jsonschema.validate(json.loads(text), SCHEMA)
            return
    pytest.fail("no stream was finished within 96 tokens, for 6 seeds")


def test_the_parse_helper_returns_the_model(client: openai.OpenAI, model: str) -> None:
    for seed in range(6):
        try:
            answer = client.chat.completions.parse(
                model=model,
                messages=HI,
                response_format=Lamp,
                max_tokens=96,
                temperature=1.5,
                seed=seed,
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, Lamp)
        return
    pytest.fail("no answer was finished within 96 tokens, for 6 seeds")


def test_json_mode_begins_with_an_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=HI,
        max_tokens=24,
        temperature=1,
        seed=1,
        response_format={"type": "json_object"},
    )
    assert str(answer.choices[0].message.content).lstrip()[:1] in ("{", "")


def test_text_is_the_default_form(client: openai.OpenAI, model: str) -> None:
    wish: dict[str, Any] = {"model": model, "messages": HI, "max_tokens": 4, "temperature": 0}
    plain = client.chat.completions.create(**wish).choices[0].message.content
    text = client.chat.completions.create(**wish, response_format={"type": "text"})
    assert text.choices[0].message.content == plain


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no-such-type"},
        {"type": "object", "properties": []},
        {"$ref": "#/$defs/nowhere"},
        {"type": "string", "pattern": "("},
    ],
    ids=["unknown type", "properties are a list", "dangling reference", "broken pattern"],
)
def test_a_bad_schema_is_refused(client: openai.OpenAI, model: str, schema: dict[str, Any]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=HI, max_tokens=4, response_format=form)


def test_an_unknown_form_is_refused(client: openai.OpenAI, model: str) -> None:
    form: Any = {"type": "yaml"}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=HI, response_format=form)


def test_constrained_and_free_answers_side_by_side(client: openai.OpenAI, model: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    free: dict[str, Any] = {"model": model, "messages": HI, "max_tokens": 12, "temperature": 0}
    alone = client.chat.completions.create(**free).choices[0].message.content
    with ThreadPoolExecutor(4) as pool:
        bound = [pool.submit(finished, client, model, response_format=FORM) for _ in "ab"]
        beside = [pool.submit(client.chat.completions.create, **free) for _ in "ab"]
        for item in bound:
            jsonschema.validate(json.loads(item.result()), SCHEMA)
        assert {item.result().choices[0].message.content for item in beside} == {alone}
