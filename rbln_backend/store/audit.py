"""Read-only search for damaged and obsolete entries of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rbln_backend.errors import CorruptArtifactError
from rbln_backend.store.artifact_files import CheckGraph, read_entry, read_manifest
from rbln_backend.store.artifacts import Entry, entry_paths

_DAY_S = 86400.0


def audit(root: Path, check: CheckGraph) -> Iterator[tuple[str, str | None]]:
    """Verify every entry; yields its digest, and its damage or None."""
    for path in entry_paths(root):
        yield path.name, _damage(path, check)


def _damage(path: Path, check: CheckGraph) -> str | None:
    try:
        manifest = read_manifest(path)
        if manifest.key.digest != path.name:
            return "its manifest belongs to another key"
        check(manifest.key, read_entry(path, manifest.key))
    except CorruptArtifactError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def unused_since(entries: Sequence[Entry], days: float, now: float) -> list[Entry]:
    """Return the entries not stored or loaded for ``days``; ``now`` in Unix seconds."""
    return [entry for entry in entries if now - entry.last_used > days * _DAY_S]


def of_other_versions(entries: Sequence[Entry], fields: Mapping[str, object]) -> list[Entry]:
    """Return the entries whose keys differ from ``fields``, those of the versions in use."""
    return [
        entry
        for entry in entries
        if any(entry.key.fields.get(name) != value for name, value in fields.items())
    ]


def above_bound(entries: Sequence[Entry], max_bytes: int) -> list[Entry]:
    """Return the least recently used entries to remove for at most ``max_bytes``."""
    excess = sum(entry.size_bytes for entry in entries) - max_bytes
    gone = []
    for entry in sorted(entries, key=lambda entry: (entry.last_used, entry.key.digest)):
        if excess <= 0:
            break
        gone.append(entry)
        excess -= entry.size_bytes
    return gone
