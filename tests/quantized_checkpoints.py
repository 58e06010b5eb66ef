"""Writes checkpoints in quantised formats, and beside each what it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint

_PROJECTION = re.compile(r"(_proj(_with_mqa)?|experts\.\d+\.w[123])\.weight$")
_HEAD = "lm_head.weight"
Format = (
    Literal["compressed-tensors", "gptq", "awq", "fp8", "mxfp4", "nvfp4"]
    | Literal["modelopt", "modelopt-mixed", "float-quantized", "int-quantized"]
)
_BYTES = ("float-quantized", "int-quantized")
_MODELOPT = ("modelopt", "modelopt-mixed")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    format: Format = "compressed-tensors"
    """``compressed-tensors`` is its format pack-quantized; two more of its formats are here."""
    bits: int = 0
    """0: what the format usually has."""
    group_size: int = 64
    symmetric: bool = True
    head_bits: int | None = None
    """Of the LM head, one scale per channel; None leaves it alone."""
    block: tuple[int, int] = (1, 0)
    """Rows and inputs that share a scale of a format with bytes; 0 stands for all."""
    static: bool = False
    """Whether there are scales for activations, too."""
    others: tuple[tuple[str, Recipe], ...] = ()
    """Recipes of the layers that end in a name, of compressed-tensors."""
    skipped: tuple[str, ...] = ()
    """Modules of every layer that fp8 and AWQ leave alone."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of ``quantization_config`` that are something else than what is written."""

    def __post_init__(self) -> None:
        usual = 8 if self.format in ("fp8", *_MODELOPT, *_BYTES) else 4
        object.__setattr__(self, "bits", self.bits or usual)

    def of(self, name: str) -> Recipe:
        return next((r for end, r in self.others if name.endswith(f"{end}.weight")), self)

    def stored(self, weight: Tensor) -> Stored:
        if self.format == "gptq":
            return gptq(weight, self.bits, self.group_size)
        if self.format == "awq":
            return awq(weight, self.group_size)
        if self.format == "nvfp4":
            return nvfp4(weight, self.group_size)
        if self.format == "compressed-tensors":
            return compressed(weight, self.bits, self.group_size, symmetric=self.symmetric)
        is_inverse = self.format == "fp8" and self.block != (0, 0)
        make = integers if self.format == "int-quantized" else floats
        plain, tensors = make(
            weight, self.block, "weight_scale_inv" if is_inverse else "weight_scale"
        )
        if self.block == (0, 0):
            tensors["weight_scale"] = tensors["weight_scale"].reshape(1)
        if self.static:
            tensors["input_scale"] = torch.tensor([0.7])
        return plain, tensors


def make_quantized_checkpoint(
    arch: str, path: Path, recipe: Recipe, *, seed: int = 0, **config_overrides: Any
) -> Path:
    """Write the checkpoint into ``path`` and a float32 one of the same values into its "plain".

    Returns ``path``.
    """
    plain = make_checkpoint(arch, path / "plain", seed=seed, **config_overrides)
    (file,) = plain.glob("*.safetensors")
    tensors, quantized = load_file(file), {}
    for name in sorted(tensors):
        meant, stored = _written(name, tensors[name], recipe)
        tensors[name] = meant
        quantized |= stored
    save_file(tensors, file, {"format": "pt"})
    save_file(quantized, path / "model.safetensors", {"format": "pt"})
    for other in plain.iterdir():
        if other.suffix != ".safetensors":
            (path / other.name).write_bytes(other.read_bytes())
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization_config(recipe, quantized) | recipe.fields
    (path / "config.json").write_text(json.dumps(config))
    return path


def _written(name: str, weight: Tensor, recipe: Recipe) -> Stored:
    """What the tensor means, and by whole names what is in the file for it."""
    if recipe.format == "mxfp4":
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return weight, {name: weight}
        meant, blocks, scales = mxfp4(weight)
        return meant, {f"{name}_blocks": blocks, f"{name}_scales": scales}
    if name == _HEAD and recipe.head_bits is not None:
        stored = Recipe(format=recipe.format, bits=recipe.head_bits, group_size=CHANNEL)
    elif _PROJECTION.search(name) and not any(module in name for module in recipe.skipped):
        stored = recipe.of(name)
    else:
        return weight, {name: weight}
    meant, parts = stored.stored(weight)
    return meant, {name.removesuffix("weight") + key: part for key, part in parts.items()}


def quantization_config(recipe: Recipe, stored: Iterable[str] = ()) -> dict[str, Any]:
    """What config.json says of such a checkpoint, whose tensors ``stored`` names."""
    if recipe.format == "gptq":
        fields = {"quant_method": "gptq", "bits": recipe.bits, "group_size": recipe.group_size}
        return fields | {"desc_act": False, "sym": True, "lm_head": recipe.head_bits is not None}
    if recipe.format == "awq":
        fields = {"quant_method": "awq", "bits": 4, "group_size": recipe.group_size}
        fields |= {"modules_to_not_convert": list(recipe.skipped) or None}
        return fields | {"zero_point": True, "version": "gemm"}
    skipped = [f"model.layers.{n}.{module}" for module in recipe.skipped for n in range(8)]
    if recipe.format == "fp8":
        block = None if recipe.block == (0, 0) else list(recipe.block)
        scheme = "static" if recipe.static else "dynamic"
        fields = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme}
        return fields | {"weight_block_size": block, "modules_to_not_convert": skipped}
    if recipe.format == "modelopt":
        ignored = ["lm_head", *skipped]
        return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ignored}
    if recipe.format in ("modelopt-mixed", "nvfp4"):
        scale = ".weight_scale"
        layers = sorted(name.removesuffix(scale) for name in stored if name.endswith(scale))
        algorithm: dict[str, Any] = {"quant_algo": "FP8"}
        if recipe.format == "nvfp4":
            algorithm = {"quant_algo": "NVFP4", "group_size": recipe.group_size}
        fields = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
        named = dict.fromkeys(layers, algorithm)
        return fields | {"quantized_layers": named, "ignore": ["lm_head"]}
    if recipe.format == "mxfp4":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return _compressed_config(recipe)


def _compressed_config(recipe: Recipe) -> dict[str, Any]:
    groups = {"group_0": _group(["Linear"], recipe)}
    for number, (end, other) in enumerate(recipe.others, start=1):
        groups[f"group_{number}"] = _group([f"re:.*{end}$"], other)
    if recipe.head_bits is not None:
        head = Recipe(bits=recipe.head_bits, group_size=CHANNEL)
        groups["group_head"] = _group(["re:.*lm_head"], head)
    kept = ["re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$"]
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if recipe.others else _ct_format(recipe),
        "config_groups": groups,
        "ignore": kept if recipe.head_bits is not None else ["lm_head", *kept],
    }


def _ct_format(recipe: Recipe) -> str:
    return recipe.format if recipe.format in _BYTES else "pack-quantized"


def _group(targets: list[str], recipe: Recipe) -> dict[str, Any]:
    is_bytes, per_channel = recipe.format in _BYTES, recipe.group_size == CHANNEL
    strategy = "channel" if per_channel else "group"
    if is_bytes:
        strategy = {(0, 0): "tensor", (1, 0): "channel"}.get(recipe.block, "block")
    kind = "float" if recipe.format == "float-quantized" else "int"
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": not recipe.static}
    activations |= {"strategy": "tensor" if recipe.static else "token"}
    weights = {"num_bits": 8 if is_bytes else recipe.bits, "type": kind, "strategy": strategy}
    weights |= {
        "symmetric": recipe.symmetric,
        "group_size": recipe.group_size if strategy == "group" else None,
        "block_structure": list(recipe.block) if strategy == "block" else None,
        "actorder": None,
        "dynamic": False,
    }
    seen = {"input_activations": activations if is_bytes else None, "output_activations": None}
    return {"targets": targets, "format": _ct_format(recipe), "weights": weights, **seen}


# -------------------------------------------------------------------------------- quantized tensors
# A weight in the formats of quantised checkpoints, and what the stored tensors stand for.
#
# Packed here as the formats' documents say, with no code of the engine's. Scales of integers are
# bfloat16 numbers, so that an engine of any dtype multiplies by the same weights.
CHANNEL = -1
Stored = tuple[Tensor, dict[str, Tensor]]
"""The weight [N, K] as it is meant, float32, and by suffix what stands for it in the file."""

_E4M3_MOST = 448.0
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The outputs in a word of AWQ from its lowest bits on.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def compressed(weight: Tensor, bits: int, group: int, *, symmetric: bool = True) -> Stored:
    """compressed-tensors pack-quantized."""
    fields, scales, zeros = _integers(weight, bits, group, symmetric=symmetric)
    stored = {"weight_packed": pack(fields, bits), "weight_scale": scales}
    stored |= {"weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        stored["weight_zero_point"] = pack(zeros.t(), bits).t().contiguous()
    return _meant(fields, scales, zeros), stored


def gptq(weight: Tensor, bits: int, group: int) -> Stored:
    """GPTQ, the first version, which stores zero points less one."""
    fields, scales, zeros = _integers(weight, bits, group)
    groups, depth = scales.shape[1], weight.shape[1]
    stored = {
        "qweight": pack(fields, bits).t().contiguous(),
        "scales": scales.t().contiguous(),
        "qzeros": pack(zeros.t() - 1, bits),
        "g_idx": (torch.arange(depth) // (depth // groups)).int(),
    }
    return _meant(fields, scales, zeros), stored


def awq(weight: Tensor, group: int) -> Stored:
    """AWQ of the version gemm: 4 bits with zero points, packed along the outputs."""
    fields, scales, zeros = _integers(weight, 4, group, symmetric=False)
    stored = {"qweight": _awq_words(fields.t()), "qzeros": _awq_words(zeros.t())}
    return _meant(fields, scales, zeros), stored | {"scales": scales.t().contiguous()}


def floats(weight: Tensor, block: tuple[int, int], scale_name: str) -> Stored:
    """e4m3 with one scale per ``block`` of rows and inputs, the last of which may be cut."""
    return _bytes(weight, block, scale_name, _E4M3_MOST, torch.float8_e4m3fn)


def integers(weight: Tensor, block: tuple[int, int], scale_name: str) -> Stored:
    """int8 with one scale per ``block``."""
    return _bytes(weight, block, scale_name, 127.0, torch.int8)


def mxfp4(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As gpt-oss stores experts [E, K, N]: what they mean, blocks [E, N, K / 32, 16], and scales.

    Scales are uint8 [E, N, K / 32], exponents of two plus 127.
    """
    by_block = weights.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (by_block.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 127)
    scaled = by_block / 2.0 ** exponents.unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    meant = _E2M1[codes] * scaled.sign() * 2.0 ** exponents.unsqueeze(-1)
    codes = codes + 8 * (scaled < 0)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    plain = meant.flatten(2).transpose(1, 2).contiguous()
    return plain, pairs.to(torch.uint8), (exponents + 127).to(torch.uint8)


def nvfp4(weight: Tensor, group: int) -> Stored:
    """NVFP4 as ModelOpt writes it: scales of e4m3 by ``group``, times one for the matrix."""
    by_group = weight.unflatten(1, (-1, group))
    second = weight.abs().max() / (_E4M3_MOST * _E2M1[-1])
    scales = (by_group.abs().amax(-1) / _E2M1[-1] / second).to(torch.float8_e4m3fn)
    whole = (scales.float() * second).unsqueeze(-1)
    scaled = by_group / whole
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    meant = _E2M1[codes] * scaled.sign() * whole
    codes = (codes + 8 * (scaled < 0)).flatten(1)
    stored = {
        "weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": second,
        "input_scale": torch.tensor(0.7),
    }
    return meant.flatten(1), stored


def pack(fields: Tensor, bits: int) -> Tensor:
    """Unsigned numbers [..., K] as words int32 [..., K * bits / 32], the first number lowest."""
    places = torch.arange(0, 32, bits)
    words = (fields.unflatten(-1, (-1, 32 // bits)) << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _integers(
    weight: Tensor, bits: int, group: int, *, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned fields [N, K], scales [N, groups] and zero points; K must have whole groups."""
    by_group = weight.unflatten(1, (1, -1) if group == CHANNEL else (-1, group))
    most = 2**bits - 1
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    if symmetric:
        scales = (by_group.abs().amax(-1) / (most // 2)).bfloat16().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((high - low) / most).bfloat16().float()
        zeros = (-low / scales).round().clamp(0, most)
    fields = (by_group / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return fields.clamp(0, most).flatten(1).long(), scales, zeros.long()


def _meant(fields: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    by_group = fields.unflatten(1, (scales.shape[1], -1)) - zeros.unsqueeze(-1)
    return (by_group * scales.unsqueeze(-1)).flatten(1)


def _awq_words(numbers: Tensor) -> Tensor:
    """[K, N] of 4 bits as words [K, N / 8]."""
    return pack(numbers.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 4)


def _bytes(
    weight: Tensor, block: tuple[int, int], scale_name: str, most: float, dtype: torch.dtype
) -> Stored:
    columns, depth = weight.shape
    rows, inputs = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    scales = torch.empty(-(-columns // rows), -(-depth // inputs))
    for row in range(scales.shape[0]):
        for at in range(scales.shape[1]):
            part = weight[row * rows : (row + 1) * rows, at * inputs : (at + 1) * inputs]
            scales[row, at] = part.abs().max() / most
    spread = scales.repeat_interleave(rows, 0)[:columns].repeat_interleave(inputs, 1)[:, :depth]
    scaled = weight / spread
    numbers = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return numbers.float() * spread, {"weight": numbers, scale_name: scales}
