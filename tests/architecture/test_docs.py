"""The pages name what exists: links, anchors, paths, modules, tests, error codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tests.architecture.wording import FORBIDDEN_WORDS

# A path in backquotes: at least one slash or a known suffix, no spaces or placeholders.
_PATH = re.compile(
    r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml|yml|cpp|h|txt|in|lock))(?:::(\w+))?`"
)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
_MODULE = re.compile(
    r"`((?:server|rbln_backend|benchmarks|deploy|tests|default_model)\.\w+(?:\.\w+)*)`"
)
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_PAGES = tuple(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", *(f"{name}/**/*.md" for name in ("docs", "examples", "benchmarks")))
    for path in sorted(ROOT.glob(pattern))
)
# Paths are relative to the repository, a package, the page, or a folder below.
_BASES = ("", "rbln_backend", "server", "docs", "benchmarks", "tests")
# Text that only looks like a path of this repository.
_ELSEWHERE = {
    # Made by a build, an installation or a server.
    *("build/sbom.cdx.json", "build/upstream-0.32.0/", "share/rbln-serve/default-model"),
    *(
        "files/ID",
        "parts/",
        "wheels/",
        "rbln/",
        "graphs/",
        "kernels/",
        "usage/",
        "profile/",
        "sdk/",
        "checkpoints/",
        "./cache",
    ),
    # Files of the reader.
    *("./pip.conf", "keys.yml", "rules.yml"),
    # Other projects, models, media types and labels.
    *("scripts/install-vllm.sh", "benchmark_throughput.py", "llama.cpp"),
    *("http/protobuf", "text/event-stream"),
    *("server.address", "server.port"),
    *("rebellions.ai/npu", "rebellions.ai/npu.present"),
}


def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def _anchors(path: Path) -> frozenset[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(
        r"^#+ (.*)$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE
    )
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower() for heading in headings)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.strip()).replace(" ", "-") for heading in plain
    )


def _broken(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name) if name else page
    if not target.exists():
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in _anchors(target.resolve())


def test_generated_pages_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", _PAGES)
def test_links_and_anchors_lead_somewhere(page: str) -> None:
    assert [link for link in _LINK.findall(_text(page)) if _broken(ROOT / page, link)] == []


@pytest.mark.parametrize("page", _PAGES)
def test_paths_and_tests_in_backquotes_exist(page: str) -> None:
    bases = ((ROOT / page).parent, *(ROOT / base for base in _BASES))
    missing = []
    models = json.loads(_text("docs/published.json"))
    for path, test in set(_PATH.findall(_text(page))):
        found = [base / path for base in bases if (base / path).exists()]
        if not found:
            missing += [path] if path not in _ELSEWHERE | models.keys() else []
        elif test and not re.search(
            rf"(?:def|class) {test}\b", found[0].read_text(encoding="utf-8")
        ):
            missing.append(f"{path}::{test}")
    assert missing == []


@pytest.mark.parametrize("page", _PAGES)
def test_modules_in_backquotes_exist(page: str) -> None:
    named = set(_MODULE.findall(_text(page))) - _ELSEWHERE
    assert [module for module in named if not _is_module_or_member(module)] == []


def _is_module_or_member(name: str) -> bool:
    """Return True if ``name`` is a module or a name that occurs in a module's source."""
    path = ROOT
    for number, part in enumerate(parts := name.split(".")):
        if (path / f"{part}.py").is_file():
            source = (path / f"{part}.py").read_text(encoding="utf-8")
            return all(re.search(rf"\b{member}\b", source) for member in parts[number + 1 :])
        path /= part
        if not path.is_dir():
            return False
    return True


@pytest.mark.parametrize("page", [p for p in _PAGES if not p.startswith("benchmarks/results")])
def test_pages_are_in_plain_words(page: str) -> None:
    words = re.findall(r"[a-z]+", _text(page).lower())
    assert FORBIDDEN_WORDS & set(words) == set()


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/engine.md", "docs/documents.md"])
def test_the_map_of_the_code_names_paths(page: str) -> None:
    assert len(set(_PATH.findall(_text(page)))) >= 10


def test_every_error_code_is_documented() -> None:
    from server.errors import ServerError

    page = _text("docs/http_api.md")
    missing, classes = [], [ServerError]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if f"| {cls.status} | `{cls.code}` |" not in page:
            missing.append(cls)
    assert missing == []


def test_the_readme_is_short() -> None:
    assert len(_text("README.md").splitlines()) <= 150
