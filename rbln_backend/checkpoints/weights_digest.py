"""Digest of a model's weights: what computed a stored page."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from rbln_backend.errors import ConfigError

_WEIGHTS = (".safetensors", ".bin", ".pt")


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
            f"{model!r} has no weights on this host ({', '.join(_WEIGHTS)}), and what "
            "unknown weights compute must not be stored; pass the model's folder"
        )
    total = blake3(max_threads=blake3.AUTO)
    for file in files:
        total.update(file.name.encode())
        total.update_mmap(file)
    return total.hexdigest()
