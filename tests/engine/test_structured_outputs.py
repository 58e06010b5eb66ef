"""Grammars in the engine: every kind, in one batch with free requests, and without a server."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.checkpoints import CheckpointCache
from tests.engine.conftest import Engine, Engines

pytestmark = pytest.mark.engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<data>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</data>",
    },
}


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Engine:
    return engines()


def generate(engine: Engine, prompts: list[str], kinds: list[Any], **options: Any) -> list[str]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=120 if kind else 12,
            structured_outputs=StructuredOutputsParams(**kind) if kind else None,
            **options,
        )
        for kind in kinds
    ]
    outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    assert all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs)
    return [output.outputs[0].text for output in outputs]


def test_every_kind_in_a_batch_with_free_requests(engine: Engine) -> None:
    kinds: list[Any] = [
        None,
        {"json": SCHEMA},
        {"regex": "[a-c]{3}-[0-9]{2}"},
        None,
        {"choice": ["red", 'say "hi"', "blue"]},
        {"grammar": 'root ::= "(" root ")" | "x"'},
        {"grammar": "start: word\nword: 'yes' | 'no'"},
        {"structural_tag": json.dumps(TAG)},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1, None, "é\t"]}}}},
    ]
    prompts = [f"prompt number {index}" for index in range(len(kinds))]
    texts = generate(engine, prompts, kinds)
    checker = Draft202012Validator(SCHEMA)
    checker.validate(json.loads(texts[1]))
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", texts[2])
    assert texts[4] in ("red", 'say "hi"', "blue")
    assert re.fullmatch(r"\(*x?\)*", texts[5])
    assert texts[6] in ("yes", "no")
    inner = re.fullmatch("<data>(.*)</data>", texts[7], re.DOTALL)
    assert inner is not None
    checker.validate(json.loads(inner[1]))
    assert json.loads(texts[8]) in (1, None, "é\t")
    # The texts without a grammar are the same as alone.
    free = [index for index, kind in enumerate(kinds) if kind is None]
    for index in free:
        assert generate(engine, [prompts[index]], [None]) == [texts[index]]


def test_json_holds_no_control_characters_and_ends_its_blanks(engine: Engine) -> None:
    # The likeliest tokens are those that a string of a bounded length must not have.
    tokenizer = engine.llm.get_tokenizer()
    odd = [i for i in range(len(tokenizer)) if set(tokenizer.decode([i])) & set("\t\r\x01\x07\x1f")]
    assert odd
    (text,) = generate(engine, ["x"], [{"json": SCHEMA}], logit_bias=dict.fromkeys(odd[:300], 50.0))
    Draft202012Validator(SCHEMA).validate(json.loads(text))
    blank = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).isspace()]
    (text,) = generate(engine, ["x"], [{"json": SCHEMA}], logit_bias=dict.fromkeys(blank, 50.0))
    Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize(
    "kind", [{"json": {"type": "array", "uniqueItems": True}}, {"regex": "(("}, {"grammar": "x ="}]
)
def test_what_no_grammar_can_do_is_refused(engine: Engine, kind: dict[str, Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError):
        generate(engine, ["x"], [kind])
    assert len(generate(engine, ["x"], [None])) == 1


def thinking_checkpoint(checkpoints: CheckpointCache, path: Path) -> Path:
    """A checkpoint two of whose tokens are the marks around a chain of thought."""
    shutil.copytree(checkpoints("llama"), path)
    place = path / "tokenizer.json"
    tokenizer = json.loads(place.read_text())
    renamed = {"<tool_call>": "<think>", "</tool_call>": "</think>"}
    for token in tokenizer["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    place.write_text(json.dumps(tokenizer))
    return path


def test_a_grammar_begins_where_the_reasoning_ends(
    engines: Engines, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    path = thinking_checkpoint(checkpoints, tmp_path / "model")
    config = {"reasoning_parser": "deepseek_r1"}
    engine = engines.fresh(checkpoint=path, structured_outputs_config=config)
    llm = engine.llm
    end = llm.get_tokenizer().convert_tokens_to_ids("</think>")
    kind = StructuredOutputsParams(regex="[a-c]{3}")
    # The model thinks for no longer than it must: the mark is always the likeliest token.
    params = SamplingParams(
        temperature=0.0,
        max_tokens=30,
        structured_outputs=kind,
        logit_bias={end: 100.0},
        min_tokens=2,
    )
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert tokens[0] == end
    assert end not in tokens[1:]
    assert re.fullmatch("[a-c]{3}", llm.get_tokenizer().decode(tokens[1:-1]))
