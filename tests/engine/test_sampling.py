"""Every sampling parameter has its meaning, and no request changes another one's text."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from tests.checkpoints import CheckpointCache
from tests.engine.conftest import Engine, Engines
from tests.engine.support import make_prompts
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

LENGTH = 24


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Engine:
    return engines("llama")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return make_prompts([20], seed=100)[0]


def sample(engine: Engine, prompt: list[int], **options: Any) -> list[int]:
    options = {"max_tokens": LENGTH, "ignore_eos": True} | options
    (output,) = engine.generate([prompt], SamplingParams(**options))
    return list(output.outputs[0].token_ids)


def greedy(engine: Engine, prompt: list[int]) -> list[int]:
    return reference_generate(engine.checkpoint, prompt, LENGTH).token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 1.0},
    ],
)
def test_degenerate_distributions_are_greedy(
    engine: Engine, prompt: list[int], options: dict[str, float]
) -> None:
    assert sample(engine, prompt, **options) == greedy(engine, prompt)


def test_a_tiny_temperature_is_greedy_where_the_choice_is_clear(engine: Engine) -> None:
    """vLLM raises it to 0.01, so a runner-up 0.2 behind is chosen once in 5e8 times."""
    candidates = make_prompts([20] * 100, seed=102)
    margins = [reference_generate(engine.checkpoint, p, LENGTH).margins.min() for p in candidates]
    prompt = next(p for p, margin in zip(candidates, margins, strict=True) if margin > 0.2)
    assert sample(engine, prompt, temperature=1e-3) == greedy(engine, prompt)


def test_a_seed_repeats_and_another_seed_differs(engine: Engine, prompt: list[int]) -> None:
    hot = {"temperature": 2.0, "top_p": 0.95}
    first = sample(engine, prompt, seed=1, **hot)
    assert sample(engine, prompt, seed=1, **hot) == first
    assert sample(engine, prompt, seed=2, **hot) != first


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 5},
        {"temperature": 1.3, "seed": 5, "top_k": 7, "frequency_penalty": 0.7},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_changes_nothing(
    engines: Engines, prompt: list[int], dtype: str, options: dict[str, Any]
) -> None:
    """Alone, in every batch size, and with neighbours that sample differently."""
    engine = engines("llama", dtype=dtype)
    mine = SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=1, **options)
    others = [
        SamplingParams(max_tokens=5, temperature=0.9, min_p=0.2, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=4),
        SamplingParams(max_tokens=17, temperature=2.0, repetition_penalty=1.4, ignore_eos=True),
    ]
    neighbours = make_prompts([3, 90, 33], seed=101)
    alone = _mine(engine, [prompt], [mine], 0)
    for count in (1, 2, 3):
        for place in (0, count):
            prompts = [*neighbours[:count]]
            params = [*others[:count]]
            prompts.insert(place, prompt)
            params.insert(place, mine)
            assert _mine(engine, prompts, params, place) == alone


def _mine(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], place: int
) -> tuple[list[int], float]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    completion = engine.llm.generate(inputs, params, use_tqdm=False)[place].outputs[0]
    return list(completion.token_ids), completion.cumulative_logprob


def test_n_returns_different_sequences(engine: Engine, prompt: list[int]) -> None:
    params = SamplingParams(n=3, temperature=2.0, seed=9, max_tokens=12, ignore_eos=True)
    (output,) = engine.generate([prompt], params)
    texts = {tuple(completion.token_ids) for completion in output.outputs}
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len(texts) == 3


def test_logit_bias_allowed_and_bad_tokens(engine: Engine, prompt: list[int]) -> None:
    best = greedy(engine, prompt)[0]
    assert set(sample(engine, prompt, temperature=0.0, logit_bias={42: 100.0})) == {42}
    allowed = sample(engine, prompt, temperature=1.0, allowed_token_ids=[30, 31, 32])
    assert set(allowed) <= {30, 31, 32}
    assert sample(engine, prompt, temperature=0.0, logit_bias={best: -100.0})[0] != best


def test_bad_words_never_appear(engine: Engine, prompt: list[int]) -> None:
    tokenizer = engine.llm.get_tokenizer()
    word = tokenizer.decode([greedy(engine, prompt)[0]])
    (output,) = engine.generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=LENGTH, bad_words=[word])
    )
    assert word not in output.outputs[0].text


def test_stop_string_ends_the_text(engine: Engine, prompt: list[int]) -> None:
    unbounded = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    (full,) = engine.generate([prompt], unbounded)
    expected = full.outputs[0].text
    stop = expected[len(expected) // 2 :][:2]
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, stop=[stop])
    (output,) = engine.generate([prompt], params)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop
    assert completion.text == expected[: expected.index(stop)]


def test_min_tokens_holds_a_stop_token_back(engine: Engine, prompt: list[int]) -> None:
    tokens = greedy(engine, prompt)
    stop_id = tokens[2]
    early = SamplingParams(temperature=0.0, max_tokens=LENGTH, stop_token_ids=[stop_id])
    late = SamplingParams(
        temperature=0.0, max_tokens=LENGTH, stop_token_ids=[stop_id], min_tokens=10
    )
    (first,) = engine.generate([prompt], early)
    (second,) = engine.generate([prompt], late)
    assert len(first.outputs[0].token_ids) == tokens.index(stop_id) + 1
    assert len(second.outputs[0].token_ids) >= 10
    assert stop_id not in second.outputs[0].token_ids[:9]


def test_penalties_follow_their_formulas(engine: Engine, prompt: list[int]) -> None:
    """Greedy decoding over penalised logits, computed from transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(engine.checkpoint, dtype=torch.float32)
    presence, frequency, repetition = 1.5, 0.4, 0.6
    generated: list[int] = []
    for _ in range(LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + generated])).logits[0, -1]
        seen = torch.tensor(sorted({*prompt, *generated}))
        logits[seen] = torch.where(
            logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition
        )
        counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=len(logits))
        logits -= frequency * counts + presence * (counts > 0)
        generated.append(int(logits.argmax()))
    actual = sample(
        engine,
        prompt,
        temperature=0.0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    assert actual == generated
    assert actual != greedy(engine, prompt)


def test_sampled_frequencies_match_the_distribution(engine: Engine, prompt: list[int]) -> None:
    """800 first tokens at temperature 1 against the softmax, over the five likeliest tokens."""
    params = SamplingParams(n=800, temperature=1.0, max_tokens=1, ignore_eos=True)
    (output,) = engine.generate([prompt], params)
    counts = Counter(completion.token_ids[0] for completion in output.outputs)
    probabilities = reference_generate(engine.checkpoint, prompt, 1).logprobs[0].exp()
    for token in probabilities.topk(5).indices.tolist():
        expected = float(probabilities[token])
        tolerance = 5 * (expected * (1 - expected) / 800) ** 0.5
        assert counts[token] / 800 == pytest.approx(expected, abs=tolerance)


# ------------------------------------------------------------------------------- structured outputs
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


def generate(engine: Engine, prompts: list[str], kinds: list[Any], **options: Any) -> list[str]:
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
