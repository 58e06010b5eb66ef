"""The double of the SDK in this process, for tests that need no engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest

from rbln_backend.devices.port import device_capabilities
from tests.sdk_double.launch import FOLDER


@cache
def _load() -> dict[str, ModuleType]:
    """Once for good: it registers ops, which no process can do twice."""
    sys.path.insert(0, str(FOLDER))
    try:
        for name in ("rebel", "rebel.core.torch_compile", "rebel.core.mega_cache"):
            importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
    return {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] == "rebel"}


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``rebel``, forgotten afterwards: other tests have no SDK."""
    modules = _load()
    device_capabilities.cache_clear()
    with monkeypatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield modules["rebel"]
    for name in modules:
        sys.modules.pop(name, None)
    device_capabilities.cache_clear()
