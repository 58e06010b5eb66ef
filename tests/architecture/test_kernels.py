"""The C++ kernels' folders: their size, and who knows the instruction set."""

from __future__ import annotations

import re

from tests.architecture.source_tree import ROOT
from tests.architecture.test_sizes import MAX_FILE_LINES, MAX_FOLDER_FILES

KERNELS = ROOT / "rbln_backend/emulator/kernels"
SOURCES = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cpp", ".h"))


def test_one_header_includes_the_intrinsics() -> None:
    # <immintrin.h> and its parts.
    intrinsics = re.compile(r"#\s*include\s*<\w*intrin\.h>|#\s*include\s*<arm_\w+\.h>")
    importers = [path.name for path in SOURCES if intrinsics.search(path.read_text())]
    assert importers == ["simd.h"]


def test_folders_and_files_are_small_enough_to_know() -> None:
    crowded = {p.parent.name for p in SOURCES if len(list(p.parent.iterdir())) > MAX_FOLDER_FILES}
    long = [path.name for path in SOURCES if len(path.read_text().splitlines()) > MAX_FILE_LINES]
    assert (crowded, long) == (set(), [])
