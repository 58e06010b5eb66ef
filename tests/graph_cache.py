"""One store of compiled graphs for all engines and servers of the tests, kept between runs.

An engine of a tiny checkpoint starts in 0.4 s with its graphs in the store and in 10 s without.
"""

import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from rbln_backend.graphs.cache import sources_digest
from tests.kernel_cache import share_kernels

_ROOTS = Path.home() / ".cache" / "rbln-serve" / "test-graphs"
_KEPT = 8
"""Roots of other sources that stay: of other worktrees, and of commits that one returns to."""


@cache
def graph_cache() -> Path:
    """Return the cache root of the present sources of graphs, with the shared kernels."""
    root = _ROOTS / sources_digest()[:16]
    share_kernels(root)
    os.utime(root)
    for old in sorted(_ROOTS.iterdir(), key=_last_use, reverse=True)[_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return root


def _last_use(root: Path) -> float:
    # Another process may be removing it.
    with suppress(FileNotFoundError):
        return root.stat().st_mtime
    return 0.0


def trace_once() -> None:
    """Let Dynamo make its tables in this process, 2 s, so that forked children inherit them.

    Engines capture graphs in children, and each child would make its own.
    """
    with torch.no_grad():
        torch.compile(torch.nn.Linear(1, 1), backend="eager", fullgraph=True)(torch.ones(1, 1))
    torch._dynamo.reset()
