"""Files and functions stay small enough to read in one go."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.source_tree import PACKAGES, ROOT, python_files, relative

MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

MAX_ROOT_FILES = 10
MAX_FOLDER_FILES = 16

# Path -> why it may be longer. A waiver whose file fits is an error, so the list cannot rot.
FILE_WAIVERS: dict[str, str] = {}
# "path:function" -> why it may be longer.
FUNCTION_WAIVERS: dict[str, str] = {}

_FOLDERS = (*PACKAGES, "tests", "benchmarks", "deploy", "docs", "requirements")


def _long_files() -> set[str]:
    found = set()
    for path in python_files(*_FOLDERS):
        name = relative(path)
        limit = MAX_TEST_FILE_LINES if name.startswith("tests/") else MAX_FILE_LINES
        if len(path.read_text(encoding="utf-8").splitlines()) > limit:
            found.add(name)
    return found


def _long_functions() -> set[str]:
    found = set()
    for path in python_files(*_FOLDERS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.add(f"{relative(path)}:{node.name}")
    return found


def test_files_are_short_or_waived() -> None:
    assert _long_files() == set(FILE_WAIVERS)


def test_functions_are_short_or_waived() -> None:
    assert _long_functions() == set(FUNCTION_WAIVERS)


def test_rooms_are_small_enough_to_know() -> None:
    folders = {path.parent for path in python_files("server", "rbln_backend")}
    crowded = {relative(folder): size for folder in folders if (size := _room_size(folder))}
    assert crowded == {}


def _room_size(folder: Path) -> int:
    """How many files lie in ``folder``; 0 where that is few enough."""
    size = len(list(folder.glob("*.py")))
    return size if size > (MAX_ROOT_FILES if folder.parent == ROOT else MAX_FOLDER_FILES) else 0
