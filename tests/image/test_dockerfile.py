"""The Dockerfile keeps its promises, as far as reading it can tell; test_image.py builds it."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from server import __version__
from tests.architecture.source_tree import ROOT

SCRIPTS = ROOT / "deploy" / "scripts"


def instructions() -> list[tuple[str, str]]:
    """Every instruction and its words, with lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines() if line]


def words_of(name: str) -> list[str]:
    return [words for kind, words in instructions() if kind == name]


def tool(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name(name)), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_is_content() -> None:
    tool("hadolint", "Dockerfile")


def test_shellcheck_is_content() -> None:
    folders = (SCRIPTS, Path(__file__).parent)
    tool("shellcheck", *(str(path) for folder in folders for path in sorted(folder.glob("*.sh"))))


def test_every_step_is_a_script_that_can_run() -> None:
    steps = words_of("RUN")
    named = [Path(name).name for step in steps for name in re.findall(r"\S+\.sh", step)]
    assert len(named) >= len(steps) >= 4
    for name in named:
        assert (SCRIPTS / name).stat().st_mode & stat.S_IXUSR, name
    for step in steps:
        words = json.loads(step) if step.startswith("[") else step.split()
        commands = [word for word in words if not word.startswith("--")]
        assert commands[0].endswith(".sh"), step


def _stages() -> dict[str, tuple[str, list[str]]]:
    """Return of each stage what it begins with, and its instructions that name scripts."""
    stages: dict[str, tuple[str, list[str]]] = {}
    for kind, words in instructions():
        if kind == "FROM":
            source, stage = words.split(" AS ")
            stages[stage] = (source, [])
        elif "deploy/scripts" in words:
            stages[stage][1].append(f"{kind} {words}")
    return stages


def _named(text: str) -> set[str]:
    return {name for name in re.findall(r"\w+\.(?:sh|py)", text) if (SCRIPTS / name).exists()}


def _with_what_they_run(names: set[str]) -> set[str]:
    found: set[str] = set()
    while names - found:
        name = (names - found).pop()
        found.add(name)
        code = re.sub(r"^#.*\n", "", (SCRIPTS / name).read_text("utf-8"), flags=re.MULTILINE)
        names |= _named(code)
    return found


def test_a_stage_has_the_scripts_of_its_step_alone() -> None:
    """A change of another script must not repeat the step."""
    stages = _stages()
    for stage, (source, lines) in stages.items():
        steps = _named(" ".join(line for line in lines if line.startswith("RUN")))
        brought = _named(" ".join(line for line in lines if "=deploy/scripts" in line))
        brought |= _named(" ".join(line for line in lines if line.startswith("COPY")))
        kept = {name for line in lines if line.endswith("/opt/container/") for name in _named(line)}
        inherited = _named(" ".join(stages[source][1])) if source in stages else set()
        wanted = _with_what_they_run(steps)
        assert wanted <= brought | inherited, stage
        assert brought - kept <= wanted, stage


def test_the_base_is_pinned_and_the_same_everywhere() -> None:
    (base,) = (words for words in words_of("ARG") if words.startswith("BASE="))
    assert re.fullmatch(r"BASE=python:3\.11\.\d+-slim-trixie@sha256:[0-9a-f]{64}", base)
    sources = [words.split(" AS ") for words in words_of("FROM")]
    stages = [stage for _, stage in sources]
    for index, (source, _) in enumerate(sources):
        assert source == "${BASE}" or source in stages[:index]
    assert stages[-1] == "emulated"
    assert "npu" in stages


def test_only_what_is_there_is_copied_and_nothing_is_fetched() -> None:
    assert not words_of("ADD")
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    for words in words_of("COPY"):
        if words.startswith("--from="):
            continue
        for source in words.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == rule or source.startswith(f"{rule}/") for rule in allowed), source


def test_the_process_is_an_unknown_user_below_an_init_that_gets_the_signals() -> None:
    (user,) = words_of("USER")
    assert re.fullmatch(r"[1-9]\d*:0", user)
    assert f"user={user.partition(':')[0]}\n" in (SCRIPTS / "prepare_runtime.sh").read_text()
    (entry,) = words_of("ENTRYPOINT")
    assert json.loads(entry)[:2] == ["/usr/bin/tini", "--"]
    assert Path(json.loads(entry)[2]).name == "container_start.sh"
    assert (SCRIPTS / "container_start.sh").read_text().count("exec rbln-serve") == 3
    (command,) = words_of("CMD")
    assert json.loads(command)[0] == "/opt/default-model"
    assert words_of("STOPSIGNAL") == ["SIGTERM"]


def test_health_is_readiness_with_time_for_a_cold_start() -> None:
    (check,) = words_of("HEALTHCHECK")
    assert "--start-period=2h" in check
    command = json.loads(check.partition(" CMD ")[2])
    assert command[1] == "-IS"
    assert Path(command[2]).name == "container_health.py"
    assert "GET /readyz" in (SCRIPTS / "container_health.py").read_text()


def test_nothing_is_asked_of_a_network_at_start() -> None:
    (environment,) = words_of("ENV")
    settings = dict(word.split("=", 1) for word in environment.split())
    assert settings["HF_HUB_OFFLINE"] == settings["VLLM_NO_USAGE_STATS"] == "1"
    (volumes,) = words_of("VOLUME")
    for name in ("VLLM_CACHE_ROOT", "HF_HOME"):
        assert settings[name] in json.loads(volumes)
    elsewhere = [value for name, value in settings.items() if name.endswith(("_CACHE", "_HOME"))]
    assert all(value.startswith(("/cache", "/models", "/tmp/")) for value in elsewhere)


def test_credentials_are_mounted_for_their_step_alone() -> None:
    (step,) = (words for words in words_of("RUN") if "install_sdk.sh" in words)
    assert "--mount=type=secret,id=pip.conf,target=/run/secrets/pip.conf,required=true" in step
    named = [*words_of("ARG"), *words_of("ENV"), *words_of("COPY")]
    assert not [
        words for words in named if re.search("pip.conf|password|token|secret", words, re.I)
    ]


@pytest.mark.parametrize(
    "name", "title description licenses version revision created source base.name".split()
)
def test_labels_say_what_the_image_is(name: str) -> None:
    assert f"org.opencontainers.image.{name}=" in " ".join(words_of("LABEL"))


def test_what_nobody_says_of_its_origin_stays_empty() -> None:
    assert {"REVISION=", "CREATED=", "SOURCE="} <= set(words_of("ARG"))


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


def test_the_runtime_has_no_script_of_the_build() -> None:
    """A line of this project is in a layer after those of packages, kernels and model."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))
    copied = re.findall(r"^COPY (.+)$", stages["runtime"], re.MULTILINE)
    scripts = "deploy/scripts/container_start.sh deploy/scripts/container_health.py"
    assert copied == [f"{scripts} /opt/container/"]
    for device in ("emulated", "npu"):
        places = re.findall(r"^COPY --from=\S+ (\S+)", stages[device], re.MULTILINE)
        last = ["/opt/bundle", "/opt/default-model", "/opt/rbln-serve", "/opt/sbom.cdx.json"]
        assert places == ["/opt/venv", *last]


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
        [sys.executable, "-m", "rbln_backend.emulator.variants", "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
