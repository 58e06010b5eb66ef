"""Workflows, hooks and settings of the host: valid, pinned, and over our own scripts."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.source_tree import ROOT

_WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
_TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
_PINNED = re.compile(r"[\w/-]+@[0-9a-f]{40}")


def _workflow(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def _steps(path: Path) -> list[dict[str, Any]]:
    jobs = _workflow(path)["jobs"].values()
    return [step for job in jobs for step in job.get("steps", ())]


def _targets() -> set[str]:
    return set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("schema", "files"),
    [("vendor.github-workflows", _WORKFLOWS), ("vendor.renovate", [ROOT / "renovate.json"])],
)
def test_files_of_the_host_are_valid(schema: str, files: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", _WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_pinned_actions_and_few_permissions(path: Path) -> None:
    workflow = _workflow(path)
    assert workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for step in _steps(path) if "uses" in step]
    assert [action for action in used if not _PINNED.fullmatch(action)] == []
    checkouts = [step for step in _steps(path) if "checkout@" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    # An expression in a script is text that others may choose.
    assert [step["run"] for step in _steps(path) if "${{" in step.get("run", "")] == []


@pytest.mark.parametrize("path", _WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_and_scripts_that_exist(path: Path) -> None:
    scripts = [step.get("run", "").replace("\\\n", " ") for step in _steps(path)]
    lines = [line for script in scripts for line in script.splitlines()]
    for line in lines:
        words = shlex.split(line.partition(">")[0], comments=True)
        if words[:1] == ["make"]:
            assert words[1] in _targets(), line
        for word in words:
            assert not word.startswith("deploy/") or (ROOT / word).exists(), line


def test_the_test_workflow_has_every_folder_of_tests() -> None:
    parts = _workflow(ROOT / ".github/workflows/checks.yml")["jobs"]["test"]["strategy"]["matrix"]
    run = [folder for part in parts["include"] for folder in part["tests"].split()]
    tests = {path.parent.relative_to(ROOT) for path in ROOT.glob("tests/**/test_*.py")}
    assert sorted(run) == sorted({"/".join(folder.parts[:2]) for folder in tests})


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v1.0.0", "## [1.1.0]\n\nnew\n", "the tag is v1.0.0"),
        ("v1.1.0", "## [1.0.0]\n\nold\n", "has no text for 1.1.0"),
        ("v1.1.0", "## [1.1.0]\n\n## [1.0.0]\n\nold\n", "has no text for 1.1.0"),
    ],
)
def test_a_release_without_notes_is_refused(tag: str, changelog: str, message: str) -> None:
    notes_of = runpy.run_path(str(ROOT / "deploy/scripts/release_notes.py"))["notes_of"]
    with pytest.raises(SystemExit, match=message):
        notes_of(tag, "1.1.0", changelog)


def test_notes_of_a_release_are_its_section_alone() -> None:
    notes_of = runpy.run_path(str(ROOT / "deploy/scripts/release_notes.py"))["notes_of"]
    changelog = "# Changes\n\n## [1.1.0] - today\n\n### Added\n\n- new\n\n## [1.0.0]\n\nold\n"
    assert notes_of("v1.1.0", "1.1.0", changelog) == "### Added\n\n- new"
