"""Packed weights and adapters as plain weights, against what the formats' makers wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rbln_backend.parity.runners.plain_formats import unpacked
from rbln_backend.parity.runners.plain_weights import add_adapter, read_weights
from tests.adapters import make_adapter, merge
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.quantized_tensors import CHANNEL


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(bits=4, group_size=64, head_bits=8),
        Recipe(bits=8, group_size=CHANNEL),
        Recipe(format="gptq", bits=4, group_size=128),
        Recipe(format="gptq", bits=8, group_size=64),
        Recipe(bits=4, group_size=64, symmetric=False),
        Recipe(format="awq", group_size=64),
        Recipe(format="fp8", block=(96, 192)),
        Recipe(format="fp8", block=(0, 0), static=True),
        Recipe(format="float-quantized"),
        Recipe(format="float-quantized", block=(64, 64)),
        Recipe(format="int-quantized", block=(0, 0), static=True),
        Recipe(format="mxfp4"),
        Recipe(format="nvfp4", group_size=16),
    ],
    ids=str,
)
def test_packed_weights_are_what_they_stand_for(recipe: Recipe, tmp_path: Path) -> None:
    if recipe.format == "mxfp4":
        make_quantized_checkpoint("gpt_oss", tmp_path, recipe, intermediate_size=64)
    else:
        make_quantized_checkpoint("llama", tmp_path, recipe)
    config = json.loads((tmp_path / "config.json").read_text())
    found = unpacked(read_weights(tmp_path), config["quantization_config"])
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].float(), tensor.float(), msg=name)


def test_zero_points_of_the_second_gptq_format_are_as_stored(tmp_path: Path) -> None:
    checkpoint = make_quantized_checkpoint("llama", tmp_path, Recipe(format="gptq"))
    tensors = read_weights(checkpoint)
    first = unpacked(tensors, {})
    second = unpacked(tensors, {"checkpoint_format": "gptq_v2"})
    name = next(name for name in tensors if name.endswith("qweight")).replace("qweight", "weight")
    assert not torch.equal(first[name], second[name])


def test_an_adapter_is_added(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "model", dtype="float32")
    adapter = make_adapter(checkpoint, tmp_path / "adapter", use_rslora=True)
    tensors = read_weights(checkpoint)
    add_adapter(tensors, adapter)
    wanted = load_file(merge(checkpoint, adapter, tmp_path / "merged") / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(tensors[name], tensor, msg=name)


def test_what_cannot_be_added_is_said(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "model", dtype="float32")
    dora = make_adapter(checkpoint, tmp_path / "dora", use_dora=True)
    with pytest.raises(ValueError, match="use_dora is not known"):
        add_adapter(read_weights(checkpoint), dora)
    plain = make_adapter(checkpoint, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"adapts .*, which the checkpoint does not have"):
        add_adapter({}, plain)
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        read_weights(tmp_path)
