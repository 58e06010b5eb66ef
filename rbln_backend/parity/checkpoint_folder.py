"""Where a checkpoint lies: at a path, or in the snapshots that the hub's library keeps."""

from __future__ import annotations

from pathlib import Path

# Weights, configuration, code, and a tokenizer's files.
_FILES = ["*.safetensors", "*.json", "*.py", "*.model", "*.txt", "*.jinja"]


def checkpoint_folder(model: str) -> Path | None:
    """Return the folder with ``config.json`` of a path or a name of the hub.

    Of a name it is the snapshot, whose folder is called by its commit; of the hub that one file
    is checked. None if there is no such file: the runners then report the error.
    """
    if Path(model).is_dir():
        return Path(model)
    # It takes half a second to import, and a path does not need it.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except (OSError, ValueError):
        return None


def downloaded_folder(model: str) -> Path:
    """Return the folder with all of a checkpoint; of a name of the hub what is missing is fetched.

    Raises what the hub's library raises.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=_FILES))
