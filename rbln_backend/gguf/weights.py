"""A file's tensors under the names, and in the order of rows, that transformers has for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.families import Family
from rbln_backend.gguf.reader import GgufFile
from rbln_backend.gguf.rope import FACTORS

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_TOLD = 3


@dataclass(frozen=True, slots=True)
class Weights:
    """Which tensor of the file is which of the model, and what is done to it."""

    file: GgufFile
    family: Family
    heads: Mapping[str, int]
    """Heads by the part of a layer whose rows are to be put in order."""
    names: Mapping[str, str]
    """The model's names and the file's."""
    architecture: str
    """The model's class in transformers."""

    @classmethod
    def of(cls, file: GgufFile, family: Family, config: PreTrainedConfig) -> Weights:
        """Match the file with the model's own layers.

        Raises `CheckpointError` where one has a tensor, or a shape, that the other has not.
        """
        names = {_name(name, family): name for name in file.tensors if name != FACTORS}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        _compare(file, names, wanted)
        heads: dict[str, Any] = {}
        if family.permuted:
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        return cls(file, family, heads, names, type(model).__name__)

    def num_bytes(self, name: str) -> int:
        """What the tensor that the model calls `name` takes once it is written."""
        shape = self.file.shape(self.names[name])
        return torch.Size(shape).numel() * self.file.dtype.itemsize

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor that the model calls `name`, in the dtype of all weights."""
        source = self.names[name]
        values = self.file.read(source)
        if self.family.norms_plus_one and source.endswith("norm.weight"):
            values = values - 1.0
        found = _LAYER.match(source)
        if found and (heads := self.heads.get(found[2])):
            values = _in_order(values, heads)
        return values.to(self.file.dtype).contiguous()


def _name(name: str, family: Family) -> str:
    part, _, kind = name.rpartition(".")
    if part in _WHOLE:
        return f"{_WHOLE[part]}.{kind}"
    found = _LAYER.fullmatch(part)
    if found and found[2] in family.layer:
        return f"model.layers.{found[1]}.{family.layer[found[2]]}.{kind}"
    raise CheckpointError(f"tensor {name} is not one of this family's; it would be left out")


def _compare(
    file: GgufFile, names: Mapping[str, str], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    if missing := sorted(wanted.keys() - names.keys()):
        raise CheckpointError(f"the file lacks {', '.join(missing[:_TOLD])}")
    if strange := sorted(names.keys() - wanted.keys()):
        told = ", ".join(names[name] for name in strange[:_TOLD])
        raise CheckpointError(f"the model has no place for {told}")
    for name, shape in wanted.items():
        if file.shape(names[name]) != shape:
            raise CheckpointError(
                f"{names[name]} is {file.shape(names[name])}, where the keys tell {shape}"
            )


def _in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of each head's two halves, which its rotation wants."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
