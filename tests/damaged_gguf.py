"""GGUF files with damaged heads: the bytes of one, changed as a bad disk or an attacker would.

``python -m tests.damaged_gguf FILE [COUNT] [SEED]`` tries many changes of a file, such as
SmolLM2's, in one process with bounded memory.
"""

from __future__ import annotations

import collections
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf import checkpoint
from rbln_backend.gguf.checkpoint import write_checkpoint
from rbln_backend.gguf.head import read_head

_MEMORY_BYTES = 8 << 30
_LARGE_BYTES = 16 << 20
_SLOW_S = 30.0
_NUMBERS = (0, 1, 2, 3, 7, 8, 9, 31, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


def damage(chooser: random.Random, content: bytes, head_bytes: int) -> bytes:
    """Return `content` with one to three changes before `head_bytes`."""
    changed = bytearray(content)
    for _ in range(chooser.choice((1, 1, 1, 2, 3))):
        place = chooser.randrange(4, max(5, min(head_bytes, len(changed))))
        match chooser.randrange(7):
            case 0:
                changed[place : place + 1] = chooser.randbytes(1)
            case 1:
                changed[place : place + 4] = struct.pack("<I", chooser.choice(_NUMBERS) % 2**32)
            case 2:
                changed[place : place + 8] = struct.pack("<Q", chooser.choice(_NUMBERS))
            case 3:
                changed[place : place + chooser.randint(1, 9)] = b""
            case 4:
                changed[place:place] = chooser.randbytes(chooser.randint(1, 9))
            case 5:
                del changed[place:]
            case _:
                _change_number(chooser, changed, head_bytes)
    return bytes(changed)


def _change_number(chooser: random.Random, content: bytearray, head_bytes: int) -> None:
    """One of the counts, lengths, types and values that are small numbers."""
    places = list(_small_numbers(content, chooser.randrange(head_bytes), head_bytes))
    if places:
        place = chooser.choice(places)
        content[place : place + 8] = struct.pack("<Q", chooser.choice(_NUMBERS))


def _small_numbers(content: bytearray, start: int, end: int) -> Iterator[int]:
    for place in range(start, min(start + 400, end, len(content) - 8)):
        if content[place] and content[place + 2 : place + 8] == bytes(6):
            yield place


def rewritten(path: Path, keys: Mapping[str, Any]) -> bytes:
    """Return the file with other values of some keys; None removes one."""
    head = read_head(path)
    merged = {name: value for name, value in {**head.keys, **keys}.items() if value is not None}
    written = struct.pack("<4sIQQ", b"GGUF", 3, len(head.tensors), len(merged))
    written += b"".join(_text(name) + _typed(value) for name, value in merged.items())
    for tensor in head.tensors:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        place = struct.pack("<IQ", tensor.ggml_type, tensor.offset)
        written += _text(tensor.name) + sizes + place
    return written + bytes(-len(written) % 32) + path.read_bytes()[head.data_start :]


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    kind, content = _encoded(value)
    return struct.pack("<I", kind) + content


def _encoded(value: Any) -> tuple[int, bytes]:
    """The type's number and the bytes of a value."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 11, struct.pack("<q", value)
        case float():
            return 12, struct.pack("<d", value)
        case str():
            return 8, _text(value)
    items = [_encoded(item) for item in value]
    kind = items[0][0] if items else 8
    return 9, struct.pack("<IQ", kind, len(items)) + b"".join(content for _, content in items)


def convert(file: Path, folder: Path) -> str | None:
    """Convert the file; why it was refused, None where it was not."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        write_checkpoint(file, folder)
    except CheckpointError as error:
        assert not list(folder.glob("*.safetensors"))
        return str(error)
    return None


def run_campaign(path: Path, count: int, seed: int) -> None:
    """Damage `path` in `count` ways and print what became of it; large weights are not written."""
    if path.stat().st_size > _LARGE_BYTES:
        checkpoint._write_weights = lambda *_: None
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    content, head_bytes = path.read_bytes(), read_head(path).data_start
    reasons: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        file, folder = Path(name) / "damaged.gguf", Path(name) / "folder"
        for number in range(count):
            file.write_bytes(damage(random.Random(f"{seed} {number}"), content, head_bytes))
            started = time.process_time()
            try:
                reason = convert(file, folder)
            except BaseException as error:
                sys.stdout.write(f"{seed} {number}: {type(error).__name__}: {error}\n")
                raise
            if (seconds := time.process_time() - started) > _SLOW_S:
                sys.stdout.write(f"{seed} {number}: {seconds:.0f} s, {reason}\n")
            reasons[reason or "accepted"] += 1
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    sys.stdout.write(f"{count} files, {reasons['accepted']} accepted, at most {most} MiB\n")
    for reason, times in reasons.most_common():
        sys.stdout.write(f"{times:6} {reason}\n")


if __name__ == "__main__":
    run_campaign(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
