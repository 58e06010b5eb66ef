"""Rules on the sources that no linter setting covers, and pages that code writes."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.architecture.source_tree import PACKAGES, ROOT, python_files, relative


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
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in forbidden:
                found.add(f"{relative(path)}: {node.func.id}")
            elif isinstance(node.func, ast.Attribute) and node.func.attr in ("GraphModule", "exec"):
                found.add(f"{relative(path)}: {node.func.attr}")
    assert found == {"rbln_backend/devices/rebel/modules.py: GraphModule"}
