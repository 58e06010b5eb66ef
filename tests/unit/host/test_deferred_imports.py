"""Deferred modules: nothing runs at the import, and a name that is used is the module's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rbln_backend.host.deferred_imports import (
    DeferredModule,
    DeferredName,
    deferred_imports,
    followed_import,
    import_deferred,
)

PACKAGE = "deferred_example"
BODY = """
import sys
class Base:
    number = 1
def double(value):
    return 2 * value
TABLE = {"a": 1}
"""
USER = f"""
from {PACKAGE} import part
from {PACKAGE}.part import Base, TABLE, below, double
from {PACKAGE}.part.below import deep

def annotated(value: Base | None = None) -> "int": ...
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    files = {
        "__init__": "",
        "part/__init__": BODY,
        "part/below": "from . import Base\ndeep = Base.number",
        "part/aside": "",
        "user": USER,
    }
    for name, text in files.items():
        path = tmp_path / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield PACKAGE
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


def user_of(package: str) -> ModuleType:
    with deferred_imports((f"{package}.part", f"{package}.part.below")):
        return importlib.import_module(f"{package}.user")


def test_importers_run_without_the_module(package: str) -> None:
    user = user_of(package)
    assert isinstance(user.part, DeferredModule)
    assert f"{package}.part" not in sys.modules


# Of these, the first uses a name of its package, which is then imported within the block.
@pytest.mark.parametrize("child", ["below", "aside"])
def test_a_package_has_the_modules_that_ran_before_it(package: str, child: str) -> None:
    with deferred_imports((f"{package}.part",)):
        below = importlib.import_module(f"{package}.part.{child}")
    part = importlib.import_module(f"{package}.part")
    assert not isinstance(part, DeferredModule)
    assert getattr(part, child) is below


def test_a_name_may_be_a_module_of_the_package(package: str) -> None:
    user: Any = user_of(package)
    assert user.below.deep == 1
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        DeferredName(f"{package}.part", "nothing")()


def test_a_name_works_as_the_real_one(package: str) -> None:
    user: Any = user_of(package)
    assert user.double(3) == 6
    assert user.TABLE["a"] == 1
    assert "a" in user.TABLE
    assert user.Base.number == 1
    real = importlib.import_module(f"{package}.part")
    assert isinstance(real.Base(), user.Base)
    assert issubclass(real.Base, user.Base)

    class Derived(user.Base):  # type: ignore[misc]
        pass

    assert Derived.__mro__[1] is real.Base


def test_a_resolved_package_imports_its_own_submodules_in_the_block(package: str) -> None:
    with deferred_imports((f"{package}.part", f"{package}.part.below")):
        user: Any = importlib.import_module(f"{package}.user")
        assert user.double(1) == 2
        below = importlib.import_module(f"{package}.part.below")
    assert below.deep == 1
    assert not isinstance(sys.modules[f"{package}.part"], DeferredModule)


def test_later_imports_find_the_module(package: str) -> None:
    user_of(package)
    assert importlib.import_module(f"{package}.part").TABLE == {"a": 1}


def test_a_missing_name_is_an_import_error_when_it_is_used(package: str) -> None:
    user: Any = user_of(package)
    with pytest.raises(ImportError, match=f"'nothing' from '{package}.part'"):
        user.part.nothing()


def test_an_import_is_followed_by_its_action(package: str) -> None:
    seen: list[dict[str, int]] = []
    with followed_import(f"{package}.part", lambda module: seen.append(module.TABLE)):
        importlib.import_module(f"{package}.user")
    assert seen == [{"a": 1}]


def test_references_become_names_when_a_module_is_imported_within_the_block(package: str) -> None:
    with deferred_imports([f"{package}.part", f"{package}.part.below"]):
        user = importlib.import_module(f"{package}.user")
        import_deferred([f"{package}.part"])
        part = importlib.import_module(f"{package}.part")
        assert user.Base is part.Base
        assert user.double is part.double
        # Another deferred module's names stay references.
        assert isinstance(user.deep, DeferredName)
