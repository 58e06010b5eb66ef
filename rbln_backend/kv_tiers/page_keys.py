"""Keys of stored pages: what computed a page, and the prefix that ends with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from rbln_backend.errors import ConfigError

# Raise it when pages are laid out in another way than before.
_FORM = 1
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


class PageKeys:
    """Keys of 32 bytes. Pages of other weights, kernels or layouts have other keys."""

    def __init__(self, made_by: Mapping[str, Any]) -> None:
        """``made_by``: everything besides the tokens that changes a page, as JSON values."""
        content = json.dumps({"form": _FORM, **made_by}, sort_keys=True, default=str)
        self._base = blake3(content.encode())

    @property
    def folder_name(self) -> str:
        """Name of the folder of all pages with this origin."""
        return self._base.hexdigest(length=16)

    def key(self, prefix: bytes, window_group: int | None = None) -> bytes:
        """Return the key of the page that ends the prefix with vLLM's hash ``prefix``.

        It is a page of all paged layers, or of one window group.
        """
        group = b"" if window_group is None else b"window %d" % window_group
        return self._base.copy().update(prefix).update(group).digest()


def weights_digest(model: str, load_format: str, seed: int) -> str:
    """Return a digest of the content of a model's weights.

    ``model`` is a folder or a file; dummy weights follow from ``seed``. Raises ``ConfigError``
    where there is no file to read.
    """
    if load_format == "dummy":
        return f"dummy-{seed}"
    place = Path(model)
    files = [place] if place.is_file() else sorted(place.glob("*"))
    files = [file for file in files if file.suffix in _WEIGHTS]
    if not files:
        raise ConfigError(
            f"KV tiers: {model!r} has no weights on this host ({', '.join(_WEIGHTS)}), and pages "
            "of unknown weights must not be stored; pass the model's folder"
        )
    total = blake3(max_threads=blake3.AUTO)
    for file in files:
        total.update(file.name.encode())
        total.update_mmap(file)
    return total.hexdigest()
