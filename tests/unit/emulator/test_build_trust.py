"""Where a library is built, and which one is loaded, when others may write the cache root."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from rbln_backend.devices.emulated import build, kernel_set
from rbln_backend.devices.emulated.build import LEVELS
from rbln_backend.graphs import kernel_files
from rbln_backend.graphs.kernel_files import (
    LIBRARY,
    RECORD,
    kernel_store,
    make_record,
    private_stores,
)

PLANTED = b"code of another user"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's own store is another one than that of whoever runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The store of a cache root that a group may write, as the image's; a library was put there."""
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o2775)
    put(kernel_store(root) / build.build_key(), PLANTED)
    return kernel_store(root)


def put(entry: Path, library: bytes) -> None:
    entry.mkdir(parents=True)
    (entry / LIBRARY).write_bytes(library)
    (entry / RECORD).write_bytes(make_record(library, "native"))


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch, native_kernels: Path) -> None:
    """The library that was built already stands in for a build."""

    def copy(directory: Path, target: build.Target, _report: build.BuildReport) -> float:
        shutil.copy(native_kernels, directory / LIBRARY)
        record = make_record(native_kernels.read_bytes(), target.name)
        (directory / RECORD).write_bytes(record)
        return 0.0

    monkeypatch.setattr(build, "build_library", copy)
    monkeypatch.setattr(kernel_set, "build_library", copy)


def test_the_image_loads_its_own_library_and_not_the_volumes(
    shared: Path,
    tmp_path: Path,
    no_compiler: None,
    native_kernels: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    level = next(level for level in LEVELS if level.runs_here())
    bundle = kernel_store(tmp_path / "bundle")
    put(bundle / build.build_key(level), native_kernels.read_bytes())
    with caplog.at_level(logging.WARNING):
        kernels = kernel_set._load([shared, *private_stores()], [bundle])
    assert kernels.library == bundle / build.build_key(level) / LIBRARY
    (line,) = caplog.messages
    assert line.startswith(f"the kernels in {shared / build.build_key()} are not run: others may")
    assert kernels.reason == f"built ahead for CPUs with {level.name}; {line}"


def test_elsewhere_a_library_is_built_where_this_user_alone_may_write(
    shared: Path, home: Path, quick_build: None, caplog: pytest.LogCaptureFixture
) -> None:
    own = [shared, *private_stores()]
    with caplog.at_level(logging.WARNING):
        first = kernel_set._load(own)
    (line,) = caplog.messages
    assert line == (
        f"kernels are not kept in {shared}: others may write {shared.parents[1]} (mode 2775)"
    )
    assert first.library is not None
    assert first.library.is_relative_to(home)
    assert first.reason == f"built in 0.0 s; others may write {shared.parents[1]} (mode 2775)"
    # Nothing was changed where others may write, and the next start builds nothing.
    assert (shared / build.build_key() / LIBRARY).read_bytes() == PLANTED
    again = kernel_set._load(own)
    assert (again.library, again.reason.partition(";")[0]) == (
        first.library,
        "loaded from the cache",
    )


def test_without_a_place_of_its_own_the_process_builds_for_itself(
    shared: Path, home: Path, quick_build: None
) -> None:
    home.chmod(0o777)
    kernels = kernel_set._load([shared, *private_stores()])
    assert kernels.reason.startswith("built for this process: others may write ")
    assert kernels.library is not None
    assert not kernels.library.exists()


def test_what_was_verified_is_what_is_loaded(
    tmp_path: Path, native_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file under the name, between the check and the load."""
    entry = tmp_path / "entry"
    put(entry, native_kernels.read_bytes())

    def verify_and_swap(path: Path) -> int:
        descriptor = kernel_files.open_library(path)
        (path / LIBRARY).unlink()
        (path / LIBRARY).write_bytes(PLANTED)
        return descriptor

    monkeypatch.setattr(kernel_set, "open_library", verify_and_swap)
    assert kernel_set._open_library(entry, "for a test").name == "native"


def test_a_damaged_library_does_not_cost_a_host_without_a_compiler_its_bundle(
    tmp_path: Path, no_compiler: None, native_kernels: Path
) -> None:
    level = next(level for level in LEVELS if level.runs_here())
    store, bundle = kernel_store(tmp_path / "cache"), kernel_store(tmp_path / "bundle")
    put(bundle / build.build_key(level), native_kernels.read_bytes())
    put(store / build.build_key(), PLANTED)
    (store / build.build_key() / LIBRARY).write_bytes(b"damaged")
    found = kernel_set.find_built([store, bundle])
    assert found is not None
    assert found[0].parent == bundle


def test_a_wheels_library_is_found_after_all_other_places(
    tmp_path: Path, no_compiler: None, native_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = next(level for level in LEVELS if level.runs_here())
    packaged = tmp_path / "prebuilt"
    put(packaged / build.build_key(level), native_kernels.read_bytes())
    monkeypatch.setattr(kernel_set, "_PACKAGED", packaged)
    stores = kernel_set.kernel_stores(str(tmp_path / "cache"), [str(tmp_path / "bundle")])
    assert stores[-2:] == [kernel_store(tmp_path / "bundle"), packaged]
    found = kernel_set.find_built(stores)
    assert found == (packaged / build.build_key(level), f"built ahead for CPUs with {level.name}")
