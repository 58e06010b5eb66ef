"""Adapters as parts of the weights, against PEFT's sum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rbln_backend.parity.transformers_side import add_adapter, plain_checkpoint, read_weights
from tests.adapters import make_adapter, merge
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint


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
    packed = make_quantized_checkpoint("llama", tmp_path / "packed", Recipe())
    with (
        pytest.raises(ValueError, match="is quantised: the transformers side adds no adapter"),
        plain_checkpoint(str(packed), str(plain)),
    ):
        pass
