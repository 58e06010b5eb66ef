"""GGUF files as checkpoints: equal weights and tokens, and nothing for a file not read in full."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rbln_backend.checkpoints.folders import convert
from rbln_backend.errors import CheckpointError
from tests.checkpoints import CheckpointCache
from tests.gguf_files import write_gguf

TEXTS = ("Hello, world!", "In 2024,  12 cats\n\n  7x", "naïve café 日本 🙂", "<|im_end|>", "")


@pytest.fixture
def checkpoint(checkpoints: CheckpointCache) -> Path:
    return checkpoints("llama", num_hidden_layers=1)


def weights_of(folder: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return dict(model.named_parameters())


def test_a_plain_file_is_the_checkpoint_that_it_was_made_of(
    checkpoint: Path, tmp_path: Path
) -> None:
    file, out = write_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "new" / "out"
    convert(file, out)
    expected, found = weights_of(checkpoint), weights_of(out)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], weight.float()), name
    former, tokenizer = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, out))
    for text in TEXTS:
        assert tokenizer.encode(text) == former.encode(text)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == former.apply_chat_template(
        chat, tokenize=False
    )
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [3]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_blocks_become_bfloat16(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    form = gguf.GGMLQuantizationType[kind]
    convert(write_gguf(checkpoint, tmp_path / "tiny.gguf", kind=form), tmp_path / "out")
    found = weights_of(tmp_path / "out")
    for name, weight in weights_of(checkpoint).items():
        values = weight.detach().float().numpy()
        if weight.dim() > 1:
            # Blocks lie along a row, so the order of rows changes none.
            values = gguf.quants.dequantize(gguf.quants.quantize(values, form), form)
        assert torch.equal(found[name], torch.from_numpy(values).bfloat16()), name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type, 'yarn'"),
        ({"keys": {"llama.attention.value_length": 8}}, r"llama\.attention\.value_length, 8"),
        ({"keys": {"tokenizer.ggml.pre": "other"}}, r"tokenizer\.ggml\.pre, 'other'"),
        ({"keys": {"tokenizer.ggml.pre": None}}, r"tokenizer\.ggml\.pre, None"),
        ({"keys": {"split.count": 3}}, "llama-gguf-split --merge"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, r"tensors rope_freqs\.weight"),
        ({"without": "ffn_down"}, r"lacks the weights model\.layers\.0\.mlp\.down_proj\.weight"),
    ],
    ids=["scaling", "heads", "pre", "no pre", "part", "tensor", "missing"],
)
def test_what_is_not_read_in_full_is_refused(
    changes: dict[str, Any], reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", **changes)
    with pytest.raises(CheckpointError, match=rf"^tiny\.gguf.*{reason}"):
        convert(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_damaged_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf")
    content = file.read_bytes()
    cuts = [0, 3, 20, 100, *random.Random(61).sample(range(len(content)), 6), len(content) - 10]
    for size in cuts:
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"^tiny\.gguf is damaged"):
            convert(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_what_is_there_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    file, out = write_gguf(checkpoint, tmp_path / "tiny.gguf"), tmp_path / "out"
    out.mkdir()
    with pytest.raises(CheckpointError, match="out exists; name a new folder"):
        convert(file, out)
    assert not list(out.iterdir())
