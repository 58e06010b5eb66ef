"""Stored graphs and kernel libraries, and bundles of them."""

from __future__ import annotations

from rbln_backend.store.archive import MAX_BYTES, read_archive, read_tree
from rbln_backend.store.artifacts import ArtifactStore, Entry, graph_store
from rbln_backend.store.audit import above_bound, audit, of_other_versions, unused_since
from rbln_backend.store.bundle_contents import Contents, collect, write_bundle, write_folder
from rbln_backend.store.cache_key import CacheKey
from rbln_backend.store.kernel_files import KernelFiles, is_intact, kernel_store, libraries
from rbln_backend.store.unpack import Imported, unpack
