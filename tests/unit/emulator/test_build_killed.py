"""A process that is killed in the middle of a build leaves nothing that runs, or that stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rbln_backend.devices.emulated import build, kernel_set
from rbln_backend.devices.emulated.build import NATIVE
from rbln_backend.errors import CompileError
from rbln_backend.host.files import claimed_folder

REPOSITORY = Path(__file__).parents[3]
# Takes g++ -O2 far longer than this test waits.
_FUNCTION = """
double f{n}(double *x, int n) {{
    double sum = {n};
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            sum += x[i] * x[j] > {n} ? x[i] / (x[j] + {n}) : x[j] - x[i] * {n};
    return sum;
}}
"""
_BUILDER = """
import sys
from pathlib import Path
from rbln_backend.devices.emulated import build, kernel_set
build._SOURCE_DIR = Path(sys.argv[1])
{call}
"""


def compilers(source: Path) -> list[str]:
    """Command lines of the processes that compile ``source``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(source) in words:
            found.append(" ".join(words))
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def kill_in_the_middle(folder: Path, call: str, **environment: str) -> None:
    """Run ``call`` in a process that is killed while the real compiler works for it."""
    sources = folder / "sources"
    sources.mkdir()
    source = sources / "big.cpp"
    source.write_text("".join(_FUNCTION.format(n=n) for n in range(6000)))
    with subprocess.Popen(
        [sys.executable, "-c", _BUILDER.format(call=call), str(sources)],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **environment},
    ) as builder:
        working = wait_for(lambda: any("cc1plus" in line for line in compilers(source)), 60)
        builder.send_signal(signal.SIGKILL)
    assert working
    assert wait_for(lambda: not compilers(source), 5), compilers(source)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.*") if path.is_dir()]


@pytest.mark.slow
def test_its_compilers_end_and_the_next_start_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    other = store / ("0" * 32)
    kill_in_the_middle(tmp_path, f"build.find_or_build(Path({str(other)!r}))")
    assert len(leftovers(store)) == 1

    def look_around(directory: Path, target: build.Target, _report: build.BuildReport) -> float:
        assert leftovers(store) == [directory]
        return 0.0

    monkeypatch.setattr(build, "build_library", look_around)
    build.find_or_build(store / build.build_key(), NATIVE)
    assert leftovers(store) == []


@pytest.mark.slow
def test_so_it_is_with_a_build_for_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    kill_in_the_middle(tmp_path, "kernel_set._build_for_process('')", TMPDIR=str(temporary))
    # The compiler's own temporary files included.
    (left,) = temporary.iterdir()
    assert left.name.startswith("rbln-kernels-")
    monkeypatch.setattr(kernel_set.tempfile, "gettempdir", lambda: str(temporary))

    def stop(directory: Path, target: build.Target, _report: build.BuildReport) -> float:
        raise OSError("stop")

    monkeypatch.setattr(kernel_set, "build_library", stop)
    with pytest.raises(CompileError, match="stop"):
        kernel_set._build_for_process("")
    assert list(temporary.iterdir()) == []


def test_a_build_under_way_is_no_leftover(tmp_path: Path) -> None:
    first = claimed_folder(tmp_path, "a.", "*.*/")
    second = claimed_folder(tmp_path, "b.", "*.*/")
    with first as one, second as two:
        assert one.is_dir()
        assert two.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_compilers_end_with_the_build(tmp_path: Path) -> None:
    with build._compilers() as group:
        # As a compiler that outlives g++, after a time-out.
        left = subprocess.Popen(["sleep", "600"], process_group=group)
    assert left.wait(5) == -signal.SIGKILL
