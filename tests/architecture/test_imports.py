"""Import rules that the contracts of pyproject.toml, which `make lint` checks, cannot express."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.architecture.source_tree import PACKAGES, ROOT, python_files, relative, syntax_nodes


@pytest.mark.parametrize("package", ["server", "rbln_backend"])
def test_no_circle_of_rooms(package: str) -> None:
    graph = grimp.build_graph(package, exclude_type_checking_imports=True)
    rooms: dict[str, set[str]] = defaultdict(set)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            here, there = _room(module), _room(imported)
            # What a folder holds may use the folders inside.
            if not f"{there}.".startswith(f"{here}.") and not f"{here}.".startswith(f"{there}."):
                rooms[here].add(there)
    TopologicalSorter(rooms).prepare()


def _room(module: str) -> str:
    """The folder of a module; a file in the package's root is a room of its own."""
    folder = module.rpartition(".")[0]
    return module if folder.count(".") == 0 else folder


def _imported_modules(path: Path) -> set[str]:
    """Every dotted module that `path` imports; `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in syntax_nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _importers(prefix: str, *folders: str) -> set[str]:
    return {
        relative(path)
        for path in python_files(*folders)
        if any(f"{name}.".startswith(f"{prefix}.") for name in _imported_modules(path))
    }


def test_only_the_front_end_adapters_import_vllm_entrypoints() -> None:
    importers = _importers("vllm.entrypoints", *PACKAGES)
    assert importers
    assert all(name.startswith("server/vllm/") for name in importers)


def test_the_server_knows_these_rooms_of_the_backend() -> None:
    """The contract `server-door` can only list the others."""
    names = {name for path in python_files("server") for name in _imported_modules(path)}
    rooms = {name.split(".")[1] for name in names if name.startswith("rbln_backend.")}
    assert rooms == {"api", "buckets", "errors", "host", "usage"}


def test_registering_the_plugin_loads_nothing_heavy() -> None:
    code = (
        "import sys, rbln_backend\n"
        "assert rbln_backend.register() == 'rbln_backend.platform.RblnPlatform'\n"
        "print(*{name.split('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "vllm", "fastapi", "transformers", "numpy", "pydantic", "rebel"}


# -------------------------------------------------------------------------------------- conventions
def test_generated_pages_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


def test_no_text_is_executed() -> None:
    """`fx.GraphModule` writes a graph as source and executes it; `CallList` runs graphs instead.

    But for the SDK, which takes nothing else.
    """
    forbidden = {"GraphModule", "symbolic_trace", "eval", "exec", "compile"}
    found = set()
    for path in python_files(*PACKAGES):
        for node in syntax_nodes(path):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in forbidden:
                found.add(f"{relative(path)}: {node.func.id}")
            elif isinstance(node.func, ast.Attribute) and node.func.attr in ("GraphModule", "exec"):
                found.add(f"{relative(path)}: {node.func.attr}")
    assert found == {"rbln_backend/devices/rebel/modules.py: GraphModule"}
