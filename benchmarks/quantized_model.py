"""Quantised forms of a checkpoint of models.py, made once and kept beside it.

Ours are compressed-tensors, packed as that format says, rounded to nearest: their speed is that of
any other checkpoint of the shape, their answers are not worth much. The input embedding stays as it
is; a tied LM head becomes one of its own, of 8 bits and one scale per channel, which is about what
llama.cpp makes of it in either of its types.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """Bits of a layer's weights and how many of them share a scale; None: a whole channel."""

    bits: int
    group_size: int | None = None

    def described(self, target: str) -> dict[str, Any]:
        """Return a config group of compressed-tensors for the layers that `target` names."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
        }
        return {"targets": [target], "weights": weights}


HEAD = Width(bits=8)
WIDTHS = {
    "w8-channel": Width(bits=8),
    "w4-group128": Width(bits=4, group_size=128),
    "w4-group64": Width(bits=4, group_size=64),
}
# What llama.cpp calls a file whose matrices are mostly of the type.
GGUF_TYPES = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def quantized_checkpoint(path: Path, name: str) -> Path:
    """Return the form of checkpoint `path` that WIDTHS calls `name`, with its tokenizer."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    place = path.with_name(f"{path.name}-{name}-{digest}")
    if not place.exists():
        building = Path(tempfile.mkdtemp(prefix="building-", dir=path.parent))
        try:
            _write(path, building, WIDTHS[name])
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
        command = [str(python), "-m", "benchmarks.quantized_model", *words]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[1], capture_output=True)
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
        del sizes[_EMBEDDING]
    return sum(sizes.values())


def _write(source: Path, target: Path, width: Width) -> None:
    from safetensors.torch import save_file

    save_file(dict(_tensors(source, width)), target / "model.safetensors", {"format": "pt"})
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "layers": width.described("Linear"),
            "head": HEAD.described("re:.*lm_head"),
        },
        "ignore": [],
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _tensors(source: Path, width: Width) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            for name in names:
                if name.endswith("_proj.weight"):
                    yield from _packed(name, tensors.get_tensor(name), width)
                elif name != _HEAD:
                    yield name, tensors.get_tensor(name)
            head = next((name for name in (_HEAD, _EMBEDDING) if name in names), None)
            if head is not None:
                yield from _packed(_HEAD, tensors.get_tensor(head), HEAD)


def _packed(name: str, weight: Tensor, width: Width) -> Iterator[tuple[str, Tensor]]:
    import torch

    most = 2 ** (width.bits - 1) - 1
    group = width.group_size or weight.shape[1]
    groups = weight.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / most).clamp(min=1e-8).to(weight.dtype)
    numbers = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-most - 1, most)
    fields = (numbers.flatten(1) + (most + 1)).to(torch.uint8)
    if width.bits == 4:
        # The first number lies in the lowest bits.
        fields = fields[:, 0::2] | (fields[:, 1::2] << 4)
    stem = name.removesuffix("weight")
    yield f"{stem}weight_packed", fields.contiguous().view(torch.int32)
    yield f"{stem}weight_scale", scales
    yield f"{stem}weight_shape", torch.tensor(weight.shape)


def main() -> None:
    """Let llama.cpp write the file of the first argument as the second, as the type of the third.

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
