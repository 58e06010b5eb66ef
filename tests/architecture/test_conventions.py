"""House rules that no linter setting covers."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from tests.architecture.source_tree import PACKAGES, ROOT, python_files, relative
from tests.architecture.wording import (
    PENDING_CLASSES,
    PENDING_FOLDERS,
    PENDING_SHAPES,
    RELEASED_WORDS,
    WORDED,
    checked_sources,
    forbidden_words,
    functions_without_shapes,
    vague_docstrings,
)

ENVIRONMENT_READERS = {"rbln_backend/settings.py", "server/settings.py"}
# Sets what the SDK reads, and looks whether the user has.
ENVIRONMENT_WRITERS = {"rbln_backend/compiler/sdk/environment.py"}
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


def _reads_environment(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv"}:
                return True
    return False


def test_the_environment_is_read_in_two_modules() -> None:
    readers = {relative(path) for path in python_files(*PACKAGES) if _reads_environment(path)}
    assert readers <= ENVIRONMENT_READERS | ENVIRONMENT_WRITERS


def test_no_file_is_named_for_nothing() -> None:
    folders = (*PACKAGES, "tests", "benchmarks", "deploy")
    assert [relative(p) for p in python_files(*folders) if p.name in VAGUE_NAMES] == []


def test_no_work_is_left_in_comments() -> None:
    marker = re.compile(r"(#|//).*\b(TODO|FIXME|XXX|HACK)\b")
    sources = [*python_files(*PACKAGES, "tests", "benchmarks", "deploy")]
    sources += [p for kind in ("*.cpp", "*.h") for p in (ROOT / "rbln_backend").rglob(kind)]
    left = [relative(p) for p in sources if marker.search(p.read_text(encoding="utf-8"))]
    assert [name for name in left if name != relative(Path(__file__))] == []


def test_git_ignores_what_is_built() -> None:
    built = [".venv/bin/python", "build/default-model/config.json", "server/__pycache__/x.pyc"]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *built],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 128 or done.stdout.split() == built  # 128: not a git checkout


def test_no_text_is_executed() -> None:
    """`fx.GraphModule` writes a graph as source and executes it; `CallList` runs graphs instead."""
    forbidden = {"GraphModule", "symbolic_trace", "eval", "exec", "compile"}
    found = set()
    for path in python_files(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in forbidden:
                found.add(f"{relative(path)}: {node.func.id}")
            elif isinstance(node.func, ast.Attribute) and node.func.attr in ("GraphModule", "exec"):
                found.add(f"{relative(path)}: {node.func.attr}")
    assert found == set()


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [
        f"{p}:{f}" for p, text in checked_sources(PENDING_FOLDERS) for f in vague_docstrings(text)
    ]
    assert found == []


def test_forbidden_words_are_absent() -> None:
    found = [
        f"{path}:{word}"
        for path, text in checked_sources(PENDING_FOLDERS)
        for word in forbidden_words(text)
        if word.split()[-1] not in RELEASED_WORDS.get(path, ())
    ]
    assert found == []


def test_every_class_name_exists_once() -> None:
    places = defaultdict(list)
    for path in python_files(*WORDED):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(relative(path))
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert {n: p for n, p in repeated.items() if n not in PENDING_CLASSES} == {}


def test_public_functions_on_tensors_name_shapes() -> None:
    found = [
        f"{path}: {name}"
        for path, text in checked_sources(PENDING_SHAPES)
        for name in functions_without_shapes(text)
    ]
    assert found == []


def test_the_checks_find_violations() -> None:
    source = (
        'def copy(x: torch.Tensor) -> None:\n    """How copies begin."""\n'
        "    # Nobody reads this.\n    was_told = 'untold'\n"
    )
    assert vague_docstrings(source) == ["2: How copies begin."]
    assert forbidden_words(source) == ["3: Nobody", "4: told"]
    assert functions_without_shapes(source) == ["copy"]
    assert functions_without_shapes(source.replace("begin", "of x [n] begin")) == []
