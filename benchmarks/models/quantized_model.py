"""Quantised forms of a checkpoint of shapes.py, made once and kept beside it.

There is one class for each published format of matrices. All round to nearest: the speed is that of
any checkpoint of the shape, the answers have no quality.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
_E4M3_MOST, _BLOCK, _GROUP = 448.0, 128, 128
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Form(Protocol):
    """One way to write a model."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of config.json that replace its own."""
        ...

    def written(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what is in the file for the tensor `name`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """compressed-tensors' packed words; the LM head is one of its own, of 8 bits by channel.

    That is about what llama.cpp makes of a tied one in either of its types.
    """

    bits: int
    group_size: int | None = None
    """Weights that share a scale; None: a whole channel."""

    @property
    def fields(self) -> dict[str, Any]:
        """As `Form`."""
        groups = {"layers": self._described("Linear"), "head": _HEAD._described("re:.*lm_head")}
        return {
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": groups,
                "ignore": [],
            },
        }

    def written(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As `Form`."""
        if name.endswith("_proj.weight"):
            yield from self._packed(name, weight)
        elif name != HEAD:
            yield name, weight
        if name in (HEAD, EMBEDDING):
            # A head of its own comes later than the embedding, and takes its place.
            yield from _HEAD._packed(HEAD, weight)

    def _described(self, target: str) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
        }
        return {"targets": [target], "weights": weights}

    def _packed(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        import torch

        most = 2 ** (self.bits - 1) - 1
        groups = weight.float().unflatten(1, (-1, self.group_size or weight.shape[1]))
        scales = (groups.abs().amax(-1) / most).clamp(min=1e-8).to(weight.dtype)
        numbers = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-most - 1, most)
        fields = (numbers.flatten(1) + (most + 1)).to(torch.uint8)
        if self.bits == 4:
            # The first value is in the lowest bits.
            fields = fields[:, 0::2] | (fields[:, 1::2] << 4)
        stem = name.removesuffix("weight")
        yield f"{stem}weight_packed", fields.contiguous().view(torch.int32)
        yield f"{stem}weight_scale", scales
        yield f"{stem}weight_shape", torch.tensor(weight.shape)


_HEAD = Words(bits=8)


class Fp8Blocks:
    """e4m3 in blocks of 128 × 128, as DeepSeek and Qwen publish; the LM head stays as it is."""

    @property
    def fields(self) -> dict[str, Any]:
        """As `Form`."""
        block = [_BLOCK, _BLOCK]
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
        return {"quantization_config": config}

    def written(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As `Form`; sizes are whole blocks."""
        import torch

        if not name.endswith("_proj.weight"):
            yield name, weight
            return
        blocks = weight.float().unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK))
        scales = (blocks.abs().amax((1, 3)) / _E4M3_MOST).clamp(min=1e-8)
        numbers = blocks / scales[:, None, :, None]
        yield name, numbers.reshape(weight.shape).to(torch.float8_e4m3fn)
        yield f"{name}_scale_inv", scales


class Awq:
    """AWQ's order of 4 bits with zero points in groups of 128; the LM head stays as it is."""

    @property
    def fields(self) -> dict[str, Any]:
        """As `Form`."""
        config = {"bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"}
        return {"quantization_config": {"quant_method": "awq", **config}}

    def written(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As `Form`."""
        if not name.endswith("_proj.weight"):
            yield name, weight
            return
        groups = weight.float().unflatten(1, (-1, _GROUP))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).clamp(min=1e-8).to(weight.dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15)
        numbers = (groups / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
        stem = name.removesuffix("weight")
        yield f"{stem}qweight", self._words(numbers.clamp(0, 15).flatten(1).t())
        yield f"{stem}scales", scales.t().contiguous()
        yield f"{stem}qzeros", self._words(zeros.t())

    def _words(self, numbers: Tensor) -> Tensor:
        import torch

        ordered = numbers.to(torch.uint8).unflatten(1, (-1, 8))[..., _AWQ_ORDER]
        pairs: Tensor = ordered[..., 0::2] | (ordered[..., 1::2] << 4)
        return pairs.flatten(1).contiguous().view(torch.int32)


class Mxfp4Experts:
    """Experts as gpt-oss is published; everything else stays as it is."""

    @property
    def fields(self) -> dict[str, Any]:
        """As `Form`."""
        return {"quantization_config": {"quant_method": "mxfp4"}}

    def written(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """As `Form`."""
        import torch

        if not name.endswith(_EXPERTS):
            yield name, weight
            return
        sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        blocks = weight.float().transpose(1, 2).contiguous().unflatten(2, (-1, 32))
        exponents = blocks.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
        scaled = blocks / 2.0 ** exponents.unsqueeze(-1)
        codes = torch.bucketize(scaled.abs(), (sizes[1:] + sizes[:-1]) / 2) + 8 * (scaled < 0)
        yield f"{name}_blocks", (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        yield f"{name}_scales", (exponents + 127).to(torch.uint8)


FORMS: dict[str, Form] = {
    "w8-channel": Words(bits=8),
    "w4-group128": Words(bits=4, group_size=128),
    "w4-group64": Words(bits=4, group_size=64),
    "fp8-block128": Fp8Blocks(),
    "awq-group128": Awq(),
    "mxfp4-experts": Mxfp4Experts(),
}


# What llama.cpp calls a file whose matrices are mostly of the type.
GGUF_TYPES = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def quantized_checkpoint(path: Path, name: str) -> Path:
    """Return the form of checkpoint `path` that FORMS calls `name`, with its tokenizer."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    place = path.with_name(f"{path.name}-{name}-{digest}")
    if not place.exists():
        building = Path(tempfile.mkdtemp(prefix="building-", dir=path.parent))
        try:
            _write(path, building, FORMS[name])
            building.rename(place)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return place


def quantized_gguf(gguf: Path, name: str, python: Path) -> Path:
    """Return the form of `gguf` that llama.cpp makes as type `name`, in the peers' environment."""
    place = gguf.with_name(f"{gguf.stem}-{name.lower()}.gguf")
    if not place.exists():
        building = place.with_suffix(".building")
        words = [str(gguf), str(building), GGUF_TYPES[name]]
        command = [str(python), "-m", "benchmarks.models.quantized_model", *words]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True)
        building.rename(place)
    return place


def step_bytes(path: Path) -> int:
    """Return the bytes of weights that a decode step reads of a folder or a GGUF file.

    An embedding that is not the LM head, too, is not read but for a few rows.
    """
    if path.is_file():
        return path.stat().st_size
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            sizes |= {name: tensors.get_tensor(name).nbytes for name in tensors.keys()}  # noqa: SIM118
    if any(name.startswith("lm_head.") for name in sizes):
        del sizes[EMBEDDING]
    return sum(sizes.values())


def _write(source: Path, target: Path, form: Form) -> None:
    from safetensors.torch import save_file

    save_file(dict(_tensors(source, form)), target / "model.safetensors", {"format": "pt"})
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | form.fields
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _tensors(source: Path, form: Form) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            # An embedding comes before a head, which may be one of its own.
            for name in sorted(tensors.keys(), key=lambda name: (name == HEAD, name)):
                yield from form.written(name, tensors.get_tensor(name))


def main() -> None:
    """Quantize the file of argument 1 to argument 2 with the type of argument 3, by llama.cpp.

    Runs in the peers' environment, which has llama.cpp and no torch.
    """
    import llama_cpp

    source, target, kind = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, kind)
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if status != 0:
        sys.exit(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    main()
