"""Distinction of local model paths from names of a model hub."""

from __future__ import annotations

import re
from pathlib import Path

_GGUF = ".gguf"
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def path_problem(name: str) -> str | None:
    """Return what is wrong with a name that can only be a path; None for any other name.

    A name of the hub has at most one slash and does not begin with a slash, a dot or a tilde.
    """
    try:
        path = Path(name).expanduser()
        is_file = path.is_file()
        if _REMOTE.match(name) or path.is_dir():
            return None
        if is_file and name.lower().endswith(_GGUF):
            return (
                f"{name!r} is a GGUF file, which is not served; write a checkpoint of it: "
                f"`rbln-serve fetch {name} OUT`"
            )
        if is_file:
            return f"{name!r} is a file; name a folder with config.json"
    except (OSError, RuntimeError) as error:
        # A name that is too long, the home of a user who does not exist.
        return f"{name!r:.300} is no path: {error!s:.300}"
    if name.lower().endswith(_GGUF):
        return f"there is no file {name!r}"
    return f"there is no directory {name!r}" if _looks_local(name) else None


def _looks_local(name: str) -> bool:
    folder, slash, _ = name.rpartition("/")
    is_inside = bool(slash) and Path(folder).is_dir()
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or is_inside
