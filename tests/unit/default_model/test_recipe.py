"""The recipe on a tiny shape: it goes on where it was, to the same bits, and its files load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from default_model.adapter import train_adapter
from default_model.batches import microbatches, shares, step_samples
from default_model.corpus import mixture
from default_model.corpus.dialogue import ask
from default_model.encoding import PROMPT_WEIGHT, encode, render
from default_model.evaluate import questions
from default_model.export import export
from default_model.lora import save_adapter
from default_model.muon import orthogonal
from default_model.optimizer import PLATEAU, WARM_UP_STEPS, learning_rate
from default_model.paths import CHECKPOINT
from default_model.shape import Shape
from default_model.tokenizer import train_tokenizer
from default_model.train import Plan, Run, make_tokenizer, train

TINY = Shape(
    vocab_size=420, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
)  # fmt: skip
PLAN = Plan(steps=4, step_tokens=200, shape=TINY)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(PLAN, texts=200)


@pytest.fixture(scope="module")
def finished(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    run = Run(PLAN, tokenizer, folder)
    lines: list[str] = []
    train(run, lines.append)
    assert lines[-1].startswith("step 4/4  loss ")
    return run, folder


def _weights(run: Run) -> dict[str, Any]:
    return run.model.state_dict()


def test_a_run_goes_on_to_the_same_bits(
    finished: tuple[Run, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    began = Run(PLAN, tokenizer, tmp_path)
    began.advance()
    began.advance()
    began.save()
    again = Run(PLAN, tokenizer, tmp_path)
    assert again.step == 2
    train(again, lambda line: None)
    whole = _weights(finished[0])
    fresh = _weights(Run(PLAN, tokenizer, tmp_path / "none"))
    assert any(not torch.equal(whole[name], fresh[name]) for name in whole)
    for name, tensor in _weights(again).items():
        assert torch.equal(tensor, whole[name]), name
    assert again.tokens == finished[0].tokens


def test_a_run_can_be_ended_early(tokenizer: Tokenizer, tmp_path: Path) -> None:
    run = Run(PLAN, tokenizer, tmp_path)
    run.advance()
    run.save()
    shorter = Run(replace(PLAN, steps=2), tokenizer, tmp_path)
    train(shorter, lambda line: None)
    assert shorter.step == 2


def test_the_rate_warms_up_stays_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 1000) for step in range(1001)]
    falls = round(1000 * PLATEAU)
    assert rates[0] == 1 / WARM_UP_STEPS
    assert set(rates[WARM_UP_STEPS : falls + 1]) == {1.0}
    assert rates[falls + (1000 - falls) // 2] == pytest.approx(0.5)
    assert rates[1000] == 0.0


def test_an_update_is_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for rows, columns in ((24, 24), (16, 40), (40, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(rows, columns)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_only_answers_count_fully(tokenizer: Tokenizer) -> None:
    sample = encode(tokenizer, ask("Who?", "Me."))
    counted = [t for t, w in zip(sample.ids, sample.weights, strict=True) if w == 1.0]
    assert tokenizer.decode(counted, skip_special_tokens=False) == "Me.<|im_end|>"
    assert {w for w in sample.weights if w != 1.0} == {PROMPT_WEIGHT}


def test_steps_draw_enough_and_lose_nothing(tokenizer: Tokenizer) -> None:
    samples = step_samples(tokenizer, mixture.draw, 1, 0, 3000)
    assert samples == step_samples(tokenizer, mixture.draw, 1, 0, 3000)
    assert samples != step_samples(tokenizer, mixture.draw, 1, 1, 3000)
    total = sum(len(sample.ids) for sample in samples)
    assert total >= 3000
    parts = shares(microbatches(samples), 2)
    weight = sum(float(batch.weights.sum()) for part in parts for batch in part)
    assert weight == pytest.approx(sum(sum(s.weights[1:]) for s in samples), rel=1e-5)


def test_texts_that_are_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 2048"):
        train_tokenizer(["only a few words"] * 3, 2048)


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
