"""The source files of this repository, as the architecture tests read them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "rbln_backend", "default_model")


def python_files(*folders: str) -> Iterator[Path]:
    """Yield the Python files under `folders` of the repository, sorted, without caches."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def syntax_nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def relative(path: Path) -> str:
    """Return `path` as messages and waivers name it, from the root with forward slashes."""
    return path.relative_to(ROOT).as_posix()
