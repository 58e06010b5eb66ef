"""The default model with tokens for reasoning, which its template begins and its answers end."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from default_model.paths import CHECKPOINT

MARKS = ("<think>", "</think>")
FIRST = 2048
END = FIRST + 1
"""The id of the token that ends reasoning."""
_ROWS = 8
"""Rows of the embedding behind the known tokens; six of them have no token."""
_TURN = '{{- "<|im_start|>assistant\\n" }}'
_OPENED = (
    '{{- "<|im_start|>assistant\\n" }}'
    "{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false"
    " else '<think>\\n' }}"
)


def write_thinking_model(folder: Path) -> Path:
    """Write it into `folder`; it ends its reasoning where the default model ends its answer."""
    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    common = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for number, mark in enumerate(MARKS):
        tokenizer["added_tokens"].append({"id": FIRST + number, "content": mark, **common})
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    assert _TURN in text
    template.write_text(text.replace(_TURN, _OPENED), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = FIRST + _ROWS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name, weight in weights.items() if weight.shape[0] == FIRST)
    rows = torch.zeros(_ROWS, weights[name].shape[1], dtype=weights[name].dtype)
    rows[1] = weights[name][config["eos_token_id"]] * 1.1
    weights[name] = torch.cat((weights[name], rows))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
