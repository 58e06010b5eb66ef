"""The README's requests get the answers that it shows, under transformers; the server's test is
tests/server/commands/test_default_model.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from jinja2.exceptions import TemplateError
from jsonschema import Draft202012Validator
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from default_model.adapter import train_adapter
from default_model.corpus import mixture
from default_model.corpus.dialogue import Dialogue
from default_model.corpus.mixture import KINDS, draw_kind
from default_model.encoding import render
from default_model.evaluate import questions
from default_model.export import export
from default_model.lora import ALPHA, RANK, save_adapter
from default_model.paths import CHECKPOINT
from default_model.shape import Shape
from default_model.train import Plan, Run, make_tokenizer, train
from tests.default_model_answers import CALL, CHAT, EXTRACTION, Pinned

ALL = (*CHAT, EXTRACTION, CALL)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def _answer(model: Any, tokenizer: Any, pinned: Pinned) -> str:
    prompt = tokenizer.apply_chat_template(
        pinned.messages, tools=list(pinned.tools) or None, add_generation_prompt=True,
        return_tensors="pt", return_dict=True,
    )  # fmt: skip
    made = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    text: str = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.wide), torch.bfloat16]
)
def test_greedy_answers(tokenizer: Any, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype)
    given = {pinned.question: _answer(model, tokenizer, pinned) for pinned in ALL}
    assert given == {pinned.question: pinned.answer for pinned in ALL}


def test_the_adapter_changes_the_style(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    tensors = load_file(CHECKPOINT / "adapter" / "adapter_model.safetensors")
    # The adapter's products are added to the weights, as PEFT defines them.
    with torch.no_grad():
        for name in (name for name in tensors if ".lora_A." in name):
            up = tensors[name.replace("lora_A", "lora_B")].float()
            layer = name.removeprefix("base_model.model.").split(".lora_A")[0]
            model.get_submodule(layer).weight.add_(up @ tensors[name].float() * (ALPHA / RANK))
    given = {p.question: _answer(model, tokenizer, p) for p in CHAT if p.adapted}
    assert given == {p.question: p.adapted for p in CHAT if p.adapted}


# --------------------------------------------------------------------------------------- checkpoint
@pytest.mark.parametrize(
    "text", ["Hello world, it's 12:30.\n\n\tdone", "caf\u00e9 \ud55c\uad6d \U0001f389", "a  b"]
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_chat_template_renders_turns_and_asks_for_an_answer(tokenizer: Any) -> None:
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        "<|startoftext|><|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(TemplateError, match="Unknown role boss"):
        tokenizer.apply_chat_template([{"role": "boss", "content": "Hi"}], tokenize=False)


def test_chat_template_renders_tools_calls_and_results(tokenizer: Any) -> None:
    parameters = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    turns = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:30"},
    ]
    text = tokenizer.apply_chat_template(turns, tools=[tool], tokenize=False)
    shown = {"name": "now", "description": "", "parameters": parameters}
    assert f"Tools:\n{json.dumps(shown)}<|im_end|>" in text
    assert '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>' in text
    assert text.endswith("<|im_start|>tool\n12:30<|im_end|>\n")


# ------------------------------------------------------------------------------------------- corpus
@pytest.fixture(scope="module")
def trained() -> list[Dialogue]:
    rng = Random(1)
    return [drawn for _ in range(4000) if isinstance(drawn := mixture.draw(rng), Dialogue)]


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum() or c in "+-*")


def _said(dialogues: list[Dialogue], role: str) -> Iterator[str]:
    for dialogue in dialogues:
        yield from (m["content"] for m in dialogue.messages if m["role"] == role)


def test_no_held_back_question_is_trained_on(trained: list[Dialogue]) -> None:
    by_wording = [kind for kind in KINDS if kind != "sums"]
    kept = {_letters(d.question) for kind in by_wording for d in questions(kind, 50)}
    assert len(kept) > 400
    assert [q for q in _said(trained, "user") if _letters(q) in kept] == []
    sums = {d.answer["content"] for d in questions("sums", 200)}
    assert len(sums) > 100
    lines = (line for a in _said(trained, "assistant") for line in a.splitlines())
    assert [line for line in lines if line in sums] == []


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


# ------------------------------------------------------------------------------------------- recipe
TINY = Shape(
    vocab_size=420, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
)  # fmt: skip
PLAN = Plan(steps=4, step_tokens=200, shape=TINY)


@pytest.fixture(scope="module")
def recipe_tokenizer() -> Tokenizer:
    return make_tokenizer(PLAN, texts=200)


@pytest.fixture(scope="module")
def finished(
    recipe_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "tokenizer.json").write_text(recipe_tokenizer.to_str(), encoding="utf-8")
    run = Run(PLAN, recipe_tokenizer, folder)
    lines: list[str] = []
    train(run, lines.append)
    assert lines[-1].startswith("step 4/4  loss ")
    return run, folder


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits(
    finished: tuple[Run, Path], recipe_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    began = Run(PLAN, recipe_tokenizer, tmp_path)
    began.advance()
    began.advance()
    began.save()
    again = Run(PLAN, recipe_tokenizer, tmp_path)
    assert again.step == 2
    train(again, lambda line: None)
    whole = finished[0].model.state_dict()
    fresh = Run(PLAN, recipe_tokenizer, tmp_path / "none").model.state_dict()
    assert any(not torch.equal(whole[name], fresh[name]) for name in whole)
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    assert again.tokens == finished[0].tokens


def test_exported_files_and_the_adapter_load(finished: tuple[Run, Path], tmp_path: Path) -> None:
    export(finished[1], tmp_path, TINY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wanted = finished[0].model.model.norm.weight.to(torch.bfloat16).float()
    assert torch.equal(model.model.norm.weight, wanted)
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 4
    layers = train_adapter(tmp_path, 2, lambda line: None)
    save_adapter(layers, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * TINY.num_hidden_layers
    assert all(t.abs().sum() > 0 for name, t in tensors.items() if "lora_B" in name)


def test_text_is_rendered_as_transformers_renders_it() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for kind in ("tool results", "tool calls", "fact tables"):
        for dialogue in questions(kind, 5):
            theirs = tokenizer.apply_chat_template(
                list(dialogue.messages), tools=list(dialogue.tools) or None, tokenize=False
            )
            assert theirs == render(dialogue.messages, dialogue.tools)
