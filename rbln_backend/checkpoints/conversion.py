"""Makes a checkpoint folder of a GGUF file, in a process of its own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from rbln_backend.errors import CheckpointError
from rbln_backend.host.child_process import ChildError, ChildJob
from rbln_backend.settings import child_environ

# A disk that writes 20 MB a second takes so long for 70 GB.
_TIMEOUT_S = 3600.0


def convert(file: Path, folder: Path) -> str:
    """Write `file` as a checkpoint into the empty `folder`; return what became of its weights.

    Raises `CheckpointError` where the file cannot be read, or not in full.
    """
    job = {"file": str(file.absolute()), "folder": str(folder.absolute())}
    child = ChildJob(
        label="GGUF",
        module="rbln_backend.gguf",
        variables=child_environ(settings=False),
        timeout=_TIMEOUT_S,
    )
    try:
        result = child.run(partial(_write, job), _read)
    except ChildError as error:
        raise CheckpointError(f"{file.name} could not be converted: {error}") from error
    if "refused" in result:
        raise CheckpointError(f"{file.name}: {result['refused']}")
    return result["done"]


def _write(job: dict[str, str], path: Path) -> None:
    path.write_text(json.dumps(job), encoding="utf-8")


def _read(path: Path) -> dict[str, str]:
    content: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return content
