"""Stored graphs and kernel libraries, and bundles of them."""

from __future__ import annotations

from rbln_backend.graphs.bundles import (
    MAX_BYTES,
    Contents,
    Imported,
    above_bound,
    audit,
    collect,
    of_other_versions,
    read_archive,
    read_tree,
    unpack,
    unused_since,
    write_bundle,
    write_folder,
)
from rbln_backend.graphs.cache import ArtifactStore, CacheKey, Entry, graph_store
from rbln_backend.graphs.kernel_files import KernelFiles, is_intact, kernel_store, libraries
