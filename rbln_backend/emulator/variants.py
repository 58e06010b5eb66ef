"""Builds kernels ahead: for this CPU during an installation, for others in an image.

``python -m rbln_backend.emulator.variants --into CACHE_ROOT`` puts one library per level where
``kernel_set.load_kernels`` looks, which takes the best one that its host can run. It needs no
package but torch, and that one's files alone.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from rbln_backend.emulator.build import build_key, find_or_build
from rbln_backend.emulator.targets import NATIVE, buildable_levels
from rbln_backend.errors import CompileError
from rbln_backend.host.trusted_files import make_trusted_folder
from rbln_backend.store.kernel_files import kernel_store

logger = logging.getLogger(__name__)


def build_variants(cache_root: Path, names: Sequence[str]) -> list[Path]:
    """The libraries of the targets in ``names``, built where missing; raises ``CompileError``."""
    store = kernel_store(cache_root)
    try:
        make_trusted_folder(store)
    except OSError as error:
        raise CompileError(f"kernels cannot be built there: {error}") from error
    entries = []
    for level in (level for level in (NATIVE, *buildable_levels()) if level.name in names):
        entry, how = find_or_build(store / build_key(level), level)
        logger.info("%s: %s, %s", level.name, entry, how)
        entries.append(entry)
    return entries


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    known = [level.name for level in buildable_levels()]
    parser = argparse.ArgumentParser(description="Build the kernels ahead of the first start.")
    parser.add_argument("--into", type=Path, required=True, help="cache root to build into")
    parser.add_argument(
        "--variants", nargs="+", default=["all"], choices=["all", NATIVE.name, *known]
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build_variants(options.into, known if "all" in options.variants else options.variants)


if __name__ == "__main__":
    main()
