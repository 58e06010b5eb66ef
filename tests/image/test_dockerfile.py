"""The Dockerfile where another file depends on it; test_image.py builds it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from server import __version__
from tests.architecture.source_tree import ROOT


def instructions() -> list[tuple[str, str]]:
    """Every instruction and its words, with lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines() if line]


def words_of(name: str) -> list[str]:
    return [words for kind, words in instructions() if kind == name]


def test_make_image_says_what_it_is_made_from(tmp_path: Path) -> None:
    """`docker` is a stand-in that writes down its arguments."""
    docker, said = tmp_path / "docker", tmp_path / "said"
    docker.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\n')
    docker.chmod(0o755)
    source = "https://example.org/rbln-serve"
    subprocess.run(
        ["make", "image", f"SOURCE={source}", "ARGS=--target npu"],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
    )
    words = said.read_text().splitlines()
    assert words[:3] == ["build", "--tag", "rbln-serve"]
    assert words[-3:] == ["--target", "npu", "."]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert re.fullmatch(r"[0-9a-f]{40}(-modified)?", given["REVISION"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", given["CREATED"])
    assert given["SOURCE"] == source


def test_the_version_is_the_projects() -> None:
    assert f"VERSION={__version__}" in words_of("ARG")


def test_kernels_are_built_from_what_their_stage_copies(tmp_path: Path) -> None:
    """A change elsewhere repeats no compilation."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (stage,) = re.findall(r"^FROM packages AS kernels\n(.*?)^RUN", text, re.M | re.S)
    for words in re.findall(r"^COPY (.+)$", stage, re.MULTILINE):
        *sources, target = words.split()
        for source in sources:
            place = (
                tmp_path / target / Path(source).name if target.endswith("/") else tmp_path / target
            )
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            place.parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / source, place)
    done = subprocess.run(
        [sys.executable, "-m", "rbln_backend.devices.emulated.build", "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
