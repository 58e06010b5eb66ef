"""Checkpoints of GGUF files, those of the catalogue by name, kept beside the benchmarks' own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.models.shapes import CACHE_ROOT
from rbln_backend.checkpoints.catalogue import CATALOGUE
from rbln_backend.checkpoints.download import download
from rbln_backend.parity.runners.plain_weights import plain_checkpoint, read_weights


def gguf_file(model: str) -> Path:
    """Return the GGUF file `model`, a path; one of the catalogue is downloaded and kept."""
    if model not in CATALOGUE:
        return Path(model)
    folder = CACHE_ROOT / "gguf"
    kept = folder / Path(CATALOGUE[model].member).name
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="download-", dir=CACHE_ROOT) as place:
            found = download(CATALOGUE[model], Path(place))
            folder.mkdir(exist_ok=True)
            found.rename(kept)
    return kept


def expanded(packed: Path) -> Path:
    """Return the checkpoint `packed`, made of a GGUF file, in bfloat16; it is kept beside it."""
    place = packed.with_name(f"{packed.name}-bfloat16")
    if not place.exists():
        with (
            tempfile.TemporaryDirectory(prefix="building-", dir=CACHE_ROOT) as building,
            plain_checkpoint(str(packed), None) as plain,
        ):
            shutil.copytree(packed, building, dirs_exist_ok=True, ignore=_weights)
            shutil.copy(Path(plain) / "config.json", building)
            tensors = read_weights(Path(plain))
            save_file(
                {name: tensor.bfloat16() for name, tensor in tensors.items()},
                Path(building) / "model.safetensors",
                {"format": "pt"},
            )
            shutil.copytree(building, place)
    return place


_weights = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
