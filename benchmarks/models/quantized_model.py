"""Quantised forms of a checkpoint of shapes.py, made once and kept beside it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.models import quantized_forms
from benchmarks.models.quantized_forms import EMBEDDING, FORMS, HEAD, Form

if TYPE_CHECKING:
    from torch import Tensor

# What llama.cpp calls a file whose matrices are mostly of the type.
GGUF_TYPES = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def quantized_checkpoint(path: Path, name: str) -> Path:
    """Return the form of checkpoint `path` that FORMS calls `name`, with its tokenizer."""
    sources = (Path(file).read_bytes() for file in (__file__, quantized_forms.__file__))
    digest = hashlib.sha256(b"".join(sources)).hexdigest()[:8]
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
