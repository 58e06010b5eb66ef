"""Checks of the writing rules that a program can hold, and the folders that still break them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.source_tree import python_files, relative

WORDED = ("server", "rbln_backend")
FORBIDDEN_WORDS = {
    *("told", "asked", "nobody", "somebody", "stranger", "strangers", "foremost", "wishes"),
}
VAGUE_START = re.compile(r"(What|Who|Whose|How|Whether)\b")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
SHAPE = re.compile(r"\[[^\]]*\]|\bshapes?\b|\bscalar\b", re.IGNORECASE)
# Columns of the released database.
RELEASED_WORDS = {"server/storage/schema.py": {"asked"}}
# Folders whose wording still breaks a rule; a folder leaves the set when it is clean.
PENDING_FOLDERS: set[str] = set()
# Class names that still exist twice.
PENDING_CLASSES = {
    "Shape",
    "Target",
    "Weights",
    "_Call",
    "_Stack",
}
# Folders whose public functions still lack shapes.
PENDING_SHAPES: set[str] = set()

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of attributes included."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value.strip()


def vague_docstrings(source: str) -> list[str]:
    """Return `line: first words` of the docstrings that begin with an interrogative."""
    found = _docstrings(ast.parse(source))
    return [f"{line}: {text[:40]}" for line, text in found if VAGUE_START.match(text)]


def forbidden_words(source: str) -> list[str]:
    """Return `line: word` of the forbidden words in names, comments and strings."""
    return [
        f"{number}: {word}"
        for number, line in enumerate(source.splitlines(), 1)
        for word in WORD.findall(line)
        if word.lower() in FORBIDDEN_WORDS
    ]


def _public_functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _public_functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, Function) and not child.name.startswith("_"):
            yield prefix + child.name, child


def _takes_tensors(function: Function) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    annotations = [a.annotation for a in (*named, arguments.vararg, arguments.kwarg) if a]
    return any(
        re.search(r"\bTensor\b", ast.unparse(annotation))
        for annotation in (*annotations, function.returns)
        if annotation is not None
    )


def functions_without_shapes(source: str) -> list[str]:
    """Return the public functions on tensors whose docstring names no shape."""
    return [
        name
        for name, function in _public_functions(ast.parse(source))
        if _takes_tensors(function) and not SHAPE.search(ast.get_docstring(function) or "")
    ]


def checked_sources(pending: set[str]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the source files outside the `pending` folders."""
    for path in python_files(*WORDED):
        if relative(path.parent) not in pending:
            yield relative(path), path.read_text(encoding="utf-8")
