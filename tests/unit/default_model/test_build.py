"""The default model is the same bytes every time, and a model that serves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from default_model.build import checkpoint_files, write_checkpoint
from default_model.tokenizer import VOCAB_SIZE, train_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("default") / "model"
    write_checkpoint(out)
    return out


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


def test_another_process_writes_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "default_model.build", "--out", str(tmp_path)]
    # One thread and another hash seed: neither may show in the files.
    environ = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    subprocess.run(command, check=True, capture_output=True, env=environ)
    names = sorted(path.name for path in model_dir.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (model_dir / name).read_bytes(), name


def test_config_comes_last_so_that_half_a_checkpoint_does_not_load() -> None:
    assert list(checkpoint_files())[-1] == "config.json"


def test_a_rebuild_replaces_damaged_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    write_checkpoint(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000_000
    assert {path.name for path in tmp_path.iterdir()} == set(checkpoint_files())


@pytest.mark.parametrize(
    "text", ["Hello world, it's 12:30.\n\n\tdone", "caf\u00e9 \ud55c\uad6d \U0001f389", "a  b"]
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_common_words_are_single_tokens(tokenizer: Any) -> None:
    assert [len(tokenizer.tokenize(f" {word}")) for word in ("server", "the", "weather")] == [1] * 3


def test_a_corpus_that_is_too_small_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("only a few words", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"VOCAB_SIZE is {VOCAB_SIZE}"):
        train_tokenizer(corpus)


def test_chat_template_renders_turns_and_asks_for_an_answer(tokenizer: Any) -> None:
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        "<|startoftext|><|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_renders_tools_calls_and_results(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    turns = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:30"},
    ]
    text = tokenizer.apply_chat_template(turns, tools=[tool], tokenize=False)
    assert json.dumps(tool) in text
    assert '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>' in text
    assert text.endswith("<|im_start|>tool\n12:30<|im_end|>\n")


def test_chat_template_refuses_an_unknown_role(tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match="Unknown role boss"):
        tokenizer.apply_chat_template([{"role": "boss", "content": "Hi"}], tokenize=False)


def test_logits_are_far_from_uniform_and_depend_on_the_context(model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 500, 900, 700], [1, 800, 300, 700]])).logits[:, -1]
    assert logits.std() > 2
    assert torch.corrcoef(logits)[0, 1] < 0.9
