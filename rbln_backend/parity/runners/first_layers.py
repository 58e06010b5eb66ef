"""Checkpoint of a model's first layers: vLLM rejects weights of missing layers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from rbln_backend.parity.checkpoint_folder import downloaded_folder
from rbln_backend.parity.job import Job

# `model.layers.3.mlp.…` and GPT-2's `h.3.mlp.…`, but not layers of an image or audio encoder.
_LAYER = re.compile(r"^(?!.*(?:vision|visual|audio)).*?\b(?:layers|h)\.(\d+)\.")


@contextmanager
def first_layers(job: Job) -> Iterator[Job]:
    """Yield the job, on a temporary checkpoint if it has fewer layers.

    Raises ``ValueError`` for a checkpoint without safetensors.
    """
    if job.num_hidden_layers is None:
        yield job
        return
    with TemporaryDirectory(prefix="rbln-layers-") as name:
        write_first_layers(downloaded_folder(job.model), Path(name), job.num_hidden_layers)
        yield replace(job, model=name)


def write_first_layers(folder: Path, cut: Path, count: int) -> None:
    """Write configuration and weights of the first ``count`` layers into ``cut``, link the rest."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors, of which layers could be left out")
    for path in folder.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            (cut / path.name).symlink_to(path.resolve())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (cut / "config.json").unlink()
    (cut / "config.json").write_text(json.dumps(_shortened(config, count)), encoding="utf-8")
    for path in files:
        with safe_open(path, framework="pt") as weights:
            names = [name for name in weights.keys() if _is_in(name, count)]  # noqa: SIM118
            kept = {name: weights.get_tensor(name) for name in names}
        if kept:
            save_file(kept, cut / path.name, {"format": "pt"})


def _shortened(config: dict[str, Any], count: int) -> dict[str, Any]:
    if "text_config" in config:
        return config | {"text_config": _shortened(config["text_config"], count)}
    shorter = config | {"num_hidden_layers": count}
    if "layer_types" in config:
        shorter["layer_types"] = config["layer_types"][:count]
    return shorter


def _is_in(name: str, count: int) -> bool:
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < count
