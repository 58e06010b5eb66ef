"""The check of a stored graph, before an import or export and in a comparison of the store."""

from __future__ import annotations

from collections.abc import Mapping

import rbln_backend.devices.emulated.ops
import rbln_backend.layers.attention_ops  # noqa: F401
from rbln_backend.errors import CorruptArtifactError
from rbln_backend.graphs.cache import BINARIES, PROGRAM, CacheKey, sources_digest
from rbln_backend.graphs.program import read_document

# Imported because they define the ops that programs call.


def check_graph(key: CacheKey, files: Mapping[str, bytes]) -> bool:
    """Raise ``CorruptArtifactError`` unless ``files`` are one program, or an NPU's binaries.

    Return False for a graph of another version: it is not checked, and its key keeps this version
    from loading it. Binaries are code in the SDK's format; ``ArtifactStore.load_code`` decides
    which sources of them are trusted.
    """
    if key.fields.get("backend_sources") != sources_digest():
        return False
    expected = BINARIES if key.fields.get("phase") == "binaries" else PROGRAM
    if files.keys() != {expected}:
        raise CorruptArtifactError(f"its files are {sorted(files)}, not {expected}")
    if expected == PROGRAM:
        read_document(files[PROGRAM])
    return True
