"""GGUF files in parts, by their names: `NAME-00001-of-00003.gguf` and on, in one folder."""

from __future__ import annotations

import re
from pathlib import Path

_NUMBERED = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def parts_of(file: Path) -> list[Path]:
    """Every file of the model that `file` begins or belongs to, the first one first."""
    named = _NUMBERED.fullmatch(file.name)
    if named is None:
        return [file]
    count = int(named["count"])
    numbers = range(1, count + 1)
    return [file.with_name(f"{named['name']}-{n:05}-of-{count:05}.gguf") for n in numbers]
