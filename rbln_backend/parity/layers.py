"""What both sides do with a model's layers: recording states, cutting, and --profile."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rbln_backend.errors import ConfigError
from rbln_backend.parity.jobs import Job, downloaded_folder

_USUAL_NAMES = ("layers", "h", "blocks", "block")


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of the decoder, by name, in order.

    They are the outermost list of modules with a usual name, else the longest list. Raises
    ``ConfigError`` for a model without one.
    """
    lists = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) > 0
    ]
    usual = [(name, part) for name, part in lists if name.rpartition(".")[2] in _USUAL_NAMES]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers to compare")
    if usual:
        name, chosen = min(usual, key=lambda item: item[0].count("."))
    else:
        name, chosen = max(lists, key=lambda item: len(list(item[1].children())))
    return [(f"{name}.{index}", layer) for index, layer in chosen.named_children()]


def get_state(output: Any) -> Tensor:
    """Return the hidden states ``[..., hidden size]`` of a layer's output.

    vLLM's layers return the last block's output and the residual, which are added here. Other
    layers return a tensor, or a tuple that begins with it.
    """
    if isinstance(output, Tensor):
        return output
    first: Tensor = output[0]
    second = output[1] if len(output) > 1 else None
    if isinstance(second, Tensor) and second.shape == first.shape:
        return first + second
    return first


@contextmanager
def tapped(model: nn.Module, take: Callable[[Tensor], None]) -> Iterator[list[str]]:
    """Call ``take`` with every layer's state [T, H], in order; yields the layers' names."""
    layers = decoder_layers(model)
    hooks = [
        layer.register_forward_hook(lambda _module, _args, output: take(get_state(output)))
        for _, layer in layers
    ]
    try:
        yield [name for name, _ in layers]
    finally:
        for hook in hooks:
            hook.remove()


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
            kept = {}
            for name in weights.keys():  # noqa: SIM118
                layer = _LAYER.match(name)
                if layer is None or int(layer[1]) < count:
                    kept[name] = weights.get_tensor(name)
        if kept:
            save_file(kept, cut / path.name, {"format": "pt"})


def _shortened(config: dict[str, Any], count: int) -> dict[str, Any]:
    if "text_config" in config:
        return config | {"text_config": _shortened(config["text_config"], count)}
    shorter = config | {"num_hidden_layers": count}
    if "layer_types" in config:
        shorter["layer_types"] = config["layer_types"][:count]
    return shorter


@contextmanager
def profiled(job: Job) -> Iterator[None]:
    """Write ``trace.json`` into the job's profile folder, if it has one.

    For an engine with several ranks it covers the driving process.
    """
    if job.profile_dir is None:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    folder = Path(job.profile_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / "trace.json"))
