"""The default model's checkpoint is small and described, and its tokenizer and template work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from default_model.card import card
from default_model.paths import CHECKPOINT


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def test_it_is_small_enough_for_a_repository() -> None:
    weights = list(CHECKPOINT.rglob("*.safetensors"))
    assert len(weights) == 2
    assert sum(path.stat().st_size for path in weights) < 12_000_000


def test_the_card_says_what_was_trained_and_measured() -> None:
    assert (CHECKPOINT / "README.md").read_text(encoding="utf-8") == card()


@pytest.mark.parametrize(
    "text", ["Hello world, it's 12:30.\n\n\tdone", "caf\u00e9 \ud55c\uad6d \U0001f389", "a  b"]
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_common_words_are_single_tokens(tokenizer: Any) -> None:
    words = ("service", "the", "weather")
    assert [len(tokenizer.tokenize(f" {word}")) for word in words] == [1, 1, 1]


def test_chat_template_renders_turns_and_asks_for_an_answer(tokenizer: Any) -> None:
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        "<|startoftext|><|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


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


def test_chat_template_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="Unknown role boss"):
        tokenizer.apply_chat_template([{"role": "boss", "content": "Hi"}], tokenize=False)
