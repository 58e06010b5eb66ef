"""Print the notes of a release: `release_notes.py TAG`.

The notes are the section of CHANGELOG.md for the version of pyproject.toml. Exits with 1 if the tag
is not that version or the section is missing. Standard library only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def notes_of(tag: str, version: str, changelog: str) -> str:
    """Return the text below the heading of ``version``; raises SystemExit."""
    if tag != f"v{version}":
        raise SystemExit(f"release_notes.py: the tag is {tag}, pyproject.toml has {version}")
    section = re.search(
        rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|^\[[^]]+\]:|\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if section is None or not section[1].strip():
        raise SystemExit(f"release_notes.py: CHANGELOG.md has no text for {version}")
    return section[1].strip()


def main(tag: str) -> None:
    """Print the notes."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    notes = notes_of(tag, version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    sys.stdout.write(notes + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
