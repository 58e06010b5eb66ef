"""Folder of a checkpoint: a path, or a snapshot of the hub's library."""

from __future__ import annotations

from pathlib import Path

# Weights, configuration, code, and a tokenizer's files.
_FILES = ["*.safetensors", "*.json", "*.py", "*.model", "*.txt", "*.jinja"]


def checkpoint_folder(model: str) -> Path | None:
    """Return the folder with ``config.json`` of a path or a name of the hub.

    For a name it is the snapshot's folder, named by the commit; only that file is checked at the
    hub. None without such a file: the runners then report the error.
    """
    if Path(model).is_dir():
        return Path(model)
    # Local import: it takes half a second, and a path does not need it.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except (OSError, ValueError):
        return None


def downloaded_folder(model: str) -> Path:
    """Return the folder with all files of a checkpoint; missing files of a name are downloaded.

    Raises what the hub's library raises.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=_FILES))
