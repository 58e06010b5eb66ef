"""The embedding of EAGLE's layers: their own, or the served model's.

A layer's graph reads one or the other. That follows from the weights, so that the keys of stored
graphs contain it, and it is read from the checkpoints' files: some commands load no weights.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rbln_backend.bucketing.engine_buckets import EAGLE, EAGLE3
from rbln_backend.speculation.choice import draft_model_of
from rbln_backend.vllm_compat.surface import ModelConfig, VllmConfig

_NAME = "embed_tokens.weight"
_ROWS = 4096
"""Rows that are compared together, in the model's dtype."""


def has_own_embedding(config: VllmConfig) -> bool:
    """Return True if the draft layer's checkpoint has another embedding than the served model's.

    False where it has none or the same, with dummy weights, and with checkpoints that are not on
    this host.
    """
    speculation = draft_model_of(config)
    if speculation is None or speculation.method not in (EAGLE, EAGLE3):
        return False
    if config.load_config.load_format == "dummy":
        return False
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    cache = config.load_config.download_dir
    own = _files_of(speculation.draft_model_config, cache)
    return _is_another(own, _files_of(config.model_config, cache), dtype)


_Files = tuple[tuple[Path, int], ...]
"""Files with their times in nanoseconds."""


def _files_of(model: ModelConfig, cache: str | None) -> _Files:
    """Return the files with weights of a folder, or of a model of the hub in its ``cache``."""
    from huggingface_hub import snapshot_download

    folder = Path(model.model)
    if not folder.is_dir():
        with suppress(OSError, ValueError):
            found = snapshot_download(
                model.model, revision=model.revision, cache_dir=cache, local_files_only=True
            )
            folder = Path(found)
    for ending in ("*.safetensors", "*.bin", "*.pt"):
        if files := sorted(folder.glob(ending)):
            return tuple((file, file.stat().st_mtime_ns) for file in files)
    return ()


@lru_cache(maxsize=4)
def _is_another(own: _Files, served: _Files, dtype: torch.dtype) -> bool:
    found = _embedding(own)
    if found is None:
        return False
    other = _embedding(served)
    if other is None or other.shape != found.shape:
        return True
    pairs = zip(found.split(_ROWS), other.split(_ROWS), strict=True)
    return not all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in pairs)


def _embedding(files: _Files) -> Tensor | None:
    """Return the embedding [V, H] in ``files``, None if there is none."""
    return next((found for file, _ in files for found in _in_file(file)), None)


def _in_file(file: Path) -> Iterator[Tensor]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                if name.endswith(_NAME):
                    yield opened.get_tensor(name)
        return
    # Files of torch before 1.6 are no archives.
    is_archive = zipfile.is_zipfile(file)
    loaded = torch.load(file, map_location="cpu", mmap=is_archive, weights_only=True)
    yield from (tensor for name, tensor in loaded.items() if name.endswith(_NAME))
