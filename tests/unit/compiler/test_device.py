"""Which device is chosen, with packages called ``rebel`` that load, fail to, or are not there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rbln_backend.config import RblnConfig
from rbln_backend.devices.port import device_capabilities
from rbln_backend.devices.rebel.compiler import make_rebel_compiler
from rbln_backend.errors import ConfigError

SDK = """
__version__ = "0.12.3"
NPU_OF = {npus!r}

ASKED = []

def get_npu_name(device_id):
    ASKED.append(device_id)
    return NPU_OF.get(device_id)

class CompileContext:
    def __init__(self, **options):
        pass
"""

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Write a package called ``rebel`` with the given source; it is forgotten afterwards."""
    core = tmp_path / "rebel" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "torch_compile.py").write_text("def rbln_backend(graph, inputs, **kwargs): ...")

    def write(source: str) -> None:
        device_capabilities.cache_clear()
        (tmp_path / "rebel" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "rebel"]:
        del sys.modules[name]
    device_capabilities.cache_clear()


def test_a_found_npu_comes_before_a_forced_name(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(SDK.format(npus={0: "RBLN-CR13"}))
    config = RblnConfig(force_npu_name="RBLN-CA25")
    assert device_capabilities(config).device == "rebel"
    with caplog.at_level(logging.WARNING):
        assert make_rebel_compiler(config, None).hardware == "RBLN-CR13"
    assert "RBLN_FORCE_NPU_NAME=RBLN-CA25 is ignored: the host has RBLN-CR13" in caplog.text


def test_the_driver_is_asked_once_for_all_layers_of_a_model(install: Install) -> None:
    install(SDK.format(npus={0: "RBLN-CR13"}))
    for _ in range(3):
        assert device_capabilities(RblnConfig()).device == "rebel"
    assert sys.modules["rebel"].ASKED == [0]


def test_a_forced_name_stands_in_where_no_npu_is(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(SDK.format(npus={}))
    config = RblnConfig(force_npu_name="RBLN-CA25")
    assert device_capabilities(RblnConfig()).device == "emulated"
    assert device_capabilities(config).device == "rebel"
    assert make_rebel_compiler(config, None).hardware == "RBLN-CA25"
    assert not caplog.text
    with pytest.raises(ConfigError, match="RBLN_FORCE_NPU_NAME"):
        device_capabilities(RblnConfig(device="rebel"))


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (RblnConfig(device="rebel"), "device='rebel'"),
        (RblnConfig(force_npu_name="RBLN-CR13"), "force_npu_name='RBLN-CR13'"),
    ],
)
def test_without_the_sdk_a_required_npu_is_an_error(config: RblnConfig, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}.*needs the RBLN SDK.*'npu' extra"):
        device_capabilities(config)


def test_without_the_sdk_the_device_is_emulated_unless_an_npu_is_required() -> None:
    assert device_capabilities(RblnConfig()).device == "emulated"
    assert (
        device_capabilities(RblnConfig(device="emulated", force_npu_name="RBLN-CR13")).device
        == "emulated"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import a_part_of_the_sdk", "ModuleNotFoundError: No module named 'a_part_of_the_sdk'"),
        ("raise ImportError('librbln.so: cannot open')", "ImportError: librbln.so: cannot open"),
        ("raise RuntimeError('registered twice')", "RuntimeError: registered twice"),
    ],
)
@pytest.mark.parametrize("config", [RblnConfig(), RblnConfig(device="rebel")])
def test_an_sdk_that_does_not_load_is_an_error(
    install: Install, config: RblnConfig, source: str, said: str
) -> None:
    install(source)
    with pytest.raises(ConfigError, match=f"'import rebel' fails with {said}"):
        device_capabilities(config)
    assert device_capabilities(RblnConfig(device="emulated")).device == "emulated"


def test_torch_rbln_that_does_not_load_is_an_error(install: Install, tmp_path: Path) -> None:
    """Else a start would go on with caches that KV transfer and tiers cannot read."""
    install(SDK.format(npus={0: "RBLN-CR13"}))
    (tmp_path / "torch_rbln.py").write_text("raise ImportError('no librbln.so')")
    assert device_capabilities(RblnConfig()).copies_caches
    with pytest.raises(ConfigError, match="torch-rbln is installed, but does not load"):
        make_rebel_compiler(RblnConfig(), None)
    off = RblnConfig(use_device_tensor=False)
    assert not device_capabilities(off).copies_caches
    assert make_rebel_compiler(off, None).hardware == "RBLN-CR13"
