"""Writes the default model: `python -m default_model.build --out DIR`.

The checkpoint lies in this package; its LoRA adapter comes to DIR/adapter. Two runs write the same
bytes, and a reader never sees half a checkpoint, because config.json, which makes a folder
loadable, is put in place last.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from default_model.paths import CHECKPOINT

_ENTRANCE = "config.json"


def checkpoint_files() -> dict[str, bytes]:
    """Return every file of the checkpoint by its path in it; config.json is the last one."""
    paths = sorted(path for path in CHECKPOINT.rglob("*") if path.is_file())
    files = {path.relative_to(CHECKPOINT).as_posix(): path.read_bytes() for path in paths}
    files[_ENTRANCE] = files.pop(_ENTRANCE)
    return files


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".build-", delete=False) as file:
        file.write(content)
    made = Path(file.name)
    made.chmod(0o644)
    made.replace(path)


def write_checkpoint(out: Path) -> int:
    """Write the checkpoint into `out`, made if missing, and return its size in bytes."""
    files = checkpoint_files()
    out.mkdir(parents=True, exist_ok=True)
    (out / _ENTRANCE).unlink(missing_ok=True)
    for name, content in files.items():
        _replace(out / name, content)
    return sum(map(len, files.values()))


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m default_model.build", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    out: Path = parser.parse_args().out
    size = write_checkpoint(out)
    sys.stdout.write(f"default model: {size / 1e6:.1f} MB in {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
