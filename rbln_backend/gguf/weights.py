"""A file's tensors under the names, and in the order of rows, that transformers has for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rbln_backend.checkpoints.block_form import BlockForm
from rbln_backend.emulator.quantized_packing import block_words
from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.blocks import as_form
from rbln_backend.gguf.families import Family
from rbln_backend.gguf.reader import GgufFile
from rbln_backend.gguf.rope import FACTORS

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_WEIGHT = ".weight"
_WHOLE = {
    "token_embd": EMBEDDING,
    "output_norm": "model.norm",
    "output": HEAD,
}
# What vLLM makes one layer has one form.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_MOST_NAMED = 3


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
    forms: Mapping[str, BlockForm]
    """Of the layers whose blocks are kept, by the model's names."""

    @classmethod
    def of(cls, file: GgufFile, family: Family, config: PreTrainedConfig) -> Weights:
        """Match the file with the model's own layers.

        Raises `CheckpointError` where one has a tensor, or a shape, that the other has not.
        """
        names = {_name(name, family): name for name in file.tensors if name != FACTORS}
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception as error:
            # Whatever a model's code makes of sizes that do not fit together.
            raise CheckpointError(f"its keys make no {config.model_type} model: {error}") from error
        wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        _compare(file, names, wanted)
        heads: dict[str, Any] = {}
        if family.permuted:
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        forms = _forms(file, names, family)
        return cls(file, family, heads, names, type(model).__name__, forms)

    def num_bytes(self, name: str) -> int:
        """Return the bytes of the written tensor `name`, by the model's name."""
        elements = torch.Size(self.file.shape(self.names[name])).numel()
        form = self.forms.get(name.removesuffix(_WEIGHT))
        return elements * self.file.dtype.itemsize if form is None else form.num_bytes(elements)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Return the written tensors of the model's tensor `name`, [N, K] or [N], by their names.

        The tensor in the dtype of all weights, or the parts of its blocks.
        """
        source, layer = self.names[name], name.removesuffix(_WEIGHT)
        if layer in self.forms:
            return {f"{layer}.{part}": value for part, value in self._packed(source, layer).items()}
        values = self.file.read(source)
        if self.family.norms_plus_one and source.endswith("norm.weight"):
            values = values - 1.0
        return {name: self._in_order(source, values).to(self.file.dtype).contiguous()}

    def _packed(self, source: str, layer: str) -> dict[str, torch.Tensor]:
        """The blocks' parts; see `rbln_backend.quantization.gguf_blocks`."""
        kind, form = self.file.block_type(source), self.forms[layer]
        assert kind is not None, layer
        numbers, scales, minima = as_form(self.file.split(source), kind.form, form)
        found = {form.format: block_words(self._in_order(source, numbers), form.bits)}
        found["scales"] = self._in_order(source, scales).contiguous()
        if minima is not None:
            found["minima"] = self._in_order(source, minima).contiguous()
        return found

    def _in_order(self, source: str, rows: torch.Tensor) -> torch.Tensor:
        found = _LAYER.match(source)
        heads = self.heads.get(found[2]) if found else None
        return _in_order(rows, heads) if heads else rows


def _forms(file: GgufFile, names: Mapping[str, str], family: Family) -> dict[str, BlockForm]:
    """By layer: what has blocks that can be kept, in the form of what vLLM joins it with."""
    kinds = {
        name.removesuffix(_WEIGHT): file.block_type(source)
        for name, source in names.items()
        if name.endswith(_WEIGHT) and len(file.shape(source)) == 2
    }
    if not family.embeds_blocks:
        del kinds[EMBEDDING]
    found: dict[str, BlockForm] = {}
    for layer in kinds:
        stem, _, last = layer.rpartition(".")
        joined = next((parts for parts in _JOINED if last in parts), (last,))
        parts = [kinds[f"{stem}.{part}" if stem else part] for part in joined]
        forms = [part.form for part in parts if part is not None]
        if len(forms) == len(parts):
            found[layer] = reduce(BlockForm.joined, forms)
    return found


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
        raise CheckpointError(f"the file lacks {', '.join(missing[:_MOST_NAMED])}")
    if strange := sorted(names.keys() - wanted.keys()):
        unknown = ", ".join(names[name] for name in strange[:_MOST_NAMED])
        raise CheckpointError(f"the model has no place for {unknown}")
    for name, shape in wanted.items():
        if file.shape(names[name]) != shape:
            raise CheckpointError(
                f"{names[name]} is {file.shape(names[name])}, where the keys tell {shape}"
            )


def _in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of each head's two halves, which its rotation wants."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
