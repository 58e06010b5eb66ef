"""The documents say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.architecture.source_tree import ROOT

# A path in backquotes: at least one slash or a known suffix, no spaces or placeholders.
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|yml|cpp|h|txt|in|lock))`")
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def test_generated_pages_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/engine.md", "docs/upgrading.md"])
def test_every_path_named_in_the_architecture_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {path for path in _PATH.findall(text) if not path.startswith("build/")}
    assert named, f"{page} names no path in backquotes"
    # Inside a section about one package, paths are named from that package.
    bases = (ROOT, ROOT / "rbln_backend", ROOT / "server")
    missing = {path for path in named if not any((base / path).exists() for base in bases)}
    assert missing == set()


@pytest.mark.parametrize(
    "page",
    [
        *("README.md", "CHANGELOG.md", "docs/architecture.md", "docs/engine.md"),
        *("docs/http_api.md", "docs/security.md", "docs/upgrading.md", "docs/documents.md"),
    ],
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = _LINK.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_test_named_beside_a_command_exists() -> None:
    page = (ROOT / "docs/documents.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w./]+)`", page))
    assert named
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_every_error_code_is_documented() -> None:
    from server.errors import TABLE

    page = (ROOT / "docs/http_api.md").read_text(encoding="utf-8")
    missing = [row for row in TABLE.values() if f"| {row.status} | `{row.code}` |" not in page]
    assert missing == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
