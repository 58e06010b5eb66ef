"""The README's requests get the answers that it shows, under transformers; the server's test is
tests/server/commands/test_default_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from default_model.lora import ALPHA, RANK
from default_model.paths import CHECKPOINT
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_answers(tokenizer: Any, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype)
    given = {pinned.question: _answer(model, tokenizer, pinned) for pinned in ALL}
    assert given == {pinned.question: pinned.answer for pinned in ALL}


def _merge(model: Any, adapter: Path) -> None:
    """Add the adapter's products to the weights, as PEFT defines them."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                up = tensors[name.replace("lora_A", "lora_B")].float()
                layer = name.removeprefix("base_model.model.").split(".lora_A")[0]
                model.get_submodule(layer).weight.add_(up @ down.float() * (ALPHA / RANK))


def test_the_adapter_changes_the_style(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    _merge(model, CHECKPOINT / "adapter")
    given = {p.question: _answer(model, tokenizer, p) for p in CHAT if p.adapted}
    assert given == {p.question: p.adapted for p in CHAT if p.adapted}
