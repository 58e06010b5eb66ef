"""Another distribution with a platform plug-in called ``rbln``, as vllm-rbln is one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from vllm import envs

from rbln_backend.api import refuse_twins
from rbln_backend.errors import PlatformError
from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.server.commands.test_cli import rbln_serve

pytestmark = pytest.mark.engine

REASON = "two platform plug-ins are called 'rbln': twin_plugin:register of vllm-twin"
TWIN = """
import sys

def register():
    return "twin_plugin.TwinPlatform"

def __getattr__(name):
    # vLLM asks for the class only when it has chosen this platform.
    print("TWIN CHOSEN", name, file=sys.stderr)
    from vllm.platforms.cpu import CpuPlatform
    return type("TwinPlatform", (CpuPlatform,), {})
"""


def distribution(folder: Path, name: str, value: str) -> Path:
    dist = folder / f"{name}-9.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    points = f"[vllm.platform_plugins]\nrbln = {value}\n"
    if name == "rbln-serve":
        points += "[vllm.general_plugins]\nrbln = rbln_backend.api:refuse_twins\n"
    (dist / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture(
    params=[
        pytest.param("ours is found first", marks=pytest.mark.wide),
        "ours is found last",
    ]
)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return PYTHONPATH; a distribution counts where its name is found first."""
    twin = distribution(tmp_path / "twin", "vllm-twin", "twin_plugin:register")
    (twin / "twin_plugin.py").write_text(TWIN)
    ours = distribution(tmp_path / "ours", "rbln-serve", "rbln_backend:register")
    folders = [ours, twin] if request.param == "ours is found first" else [twin, ours]
    return os.pathsep.join(map(str, [*folders, ROOT]))


def test_check_refuses_it(path: str, checkpoints: CheckpointCache) -> None:
    done = rbln_serve("check", str(checkpoints("llama")), PYTHONPATH=path, VLLM_PLUGINS="rbln")
    assert done.returncode == 2
    assert REASON in done.stderr
    assert "uninstall vllm-twin" in done.stderr
    assert not done.stdout


def test_serve_refuses_it(path: str, checkpoints: CheckpointCache, tmp_path: Path) -> None:
    flags = ("--host", "127.0.0.1", "--port", "0", "--run-root", str(tmp_path))
    done = rbln_serve("serve", str(checkpoints("llama")), *flags, PYTHONPATH=path)
    assert done.returncode == 1
    assert REASON in done.stderr


def test_python_refuses_it(path: str, checkpoints: CheckpointCache) -> None:
    code = "from vllm import EngineArgs; EngineArgs(model={!r}).create_engine_config()"
    done = subprocess.run(
        [sys.executable, "-c", code.format(str(checkpoints("llama")))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 1
    assert f"PlatformError: {REASON}" in done.stderr


@pytest.mark.parametrize(("plugins", "refused"), [("", False), ("rbln", True)])
def test_an_unselected_plugin_is_no_twin(
    path: str, monkeypatch: pytest.MonkeyPatch, plugins: str, refused: bool
) -> None:
    for folder in reversed(path.split(os.pathsep)):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    # An engine in this process, as other tests make, freezes the variables' values.
    envs.disable_envs_cache()
    with pytest.raises(PlatformError) if refused else nullcontext():
        refuse_twins()
