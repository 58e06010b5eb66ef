"""One build of the emulator's kernels for all cache roots that tests make."""

from __future__ import annotations

from pathlib import Path

SHARED = Path.home() / ".cache" / "rbln-serve" / "test-kernels"


def share_kernels(cache_root: Path) -> Path:
    """Let ``cache_root`` find the shared kernels instead of building its own; returns it."""
    SHARED.mkdir(parents=True, exist_ok=True)
    link = cache_root / "rbln" / "kernels"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(SHARED, target_is_directory=True)
    return cache_root
