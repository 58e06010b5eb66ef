"""Building the library: cached, atomic, shared, repaired; and what happens without a compiler."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rbln_backend.devices.emulated import build, kernel_set
from rbln_backend.devices.emulated.build import LEVELS, NATIVE, build_variants
from rbln_backend.errors import CompileError
from rbln_backend.graphs import kernel_files
from rbln_backend.graphs.kernel_files import (
    LIBRARY,
    RECORD,
    kernel_store,
    make_record,
    private_stores,
    publish,
)
from rbln_backend.host.files import claimed_folder
from tests.kernel_cache import SHARED, VARIANTS, share_kernels, strict

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_kernels: Path) -> Path:
    """A g++ that hands out the library built already and logs a line per link."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "links"
    log.touch()
    script = folder / "g++"
    script.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != -o ]; do [ "$1" = -shared ] && link=1; shift; done\n'
        f'[ -z "$link" ] && {{ : > "$2"; exit 0; }}\n'
        f"sleep 0.05; echo link >> {log}; cp {native_kernels} $2\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    # This user's own store is another one than that of whoever runs the tests.
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return log


def test_built_once_and_found_afterwards(compiler: Path, tmp_path: Path) -> None:
    entry = tmp_path / "store" / "key"
    entry.parent.mkdir()
    reported: list[tuple[int, int]] = []
    _, how = build.find_or_build(entry, report=lambda done, of: reported.append((done, of)))
    assert how.startswith("built in ")
    total = reported[0][1]
    assert total > 5
    assert reported == [(done, total) for done in range(total + 1)]
    assert build.find_or_build(entry) == (entry, "loaded from the cache")
    assert compiler.read_text() == "link\n"
    assert sorted(path.name for path in entry.iterdir()) == ["library.json", "librbln_emulator.so"]
    # Other users can read it.
    assert entry.stat().st_mode & 0o777 == 0o755


def test_two_at_once_build_once(compiler: Path, tmp_path: Path) -> None:
    entry = tmp_path / "key"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(build.find_or_build, [entry] * 4))
    assert {path for path, _ in found} == {entry}
    assert sum(reason.startswith("built") for _, reason in found) == 1
    assert compiler.read_text() == "link\n"


@pytest.mark.parametrize("name", ["library.json", "librbln_emulator.so"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_library_is_rebuilt(
    compiler: Path, tmp_path: Path, name: str, damage: str
) -> None:
    entry = tmp_path / "key"
    build.find_or_build(entry)
    content = bytearray((entry / name).read_bytes())
    if damage == "remove":
        (entry / name).unlink()
    elif damage == "truncate":
        (entry / name).write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 3] ^= 0xFF
        (entry / name).write_bytes(content)
    assert build.find_or_build(entry)[1].startswith("rebuilt, the cached library was damaged")
    assert kernel_files.is_intact(entry)
    assert compiler.read_text() == "link\nlink\n"


def test_a_failed_build_leaves_nothing_and_quotes_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "g++"
    script.write_text("#!/bin/sh\necho 'kernels.h:1: error: no such thing' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    store = tmp_path / "store"
    (store / "key.abandoned").mkdir(parents=True)
    with pytest.raises(CompileError, match="error: no such thing"):
        build.find_or_build(store / "key")
    assert [path.name for path in store.iterdir()] == ["key.lock"]


_LOADER = """
import json, sys, torch
from pathlib import Path
import rbln_backend.layers.attention_ops
from rbln_backend.devices.emulated.kernel_set import load_kernels
from rbln_backend.errors import CompileError
def load(folder, mode):
    try:
        kernels = load_kernels(Path(folder), mode)
    except CompileError as error:
        return str(error)
    out = torch.ops.rbln_emulator.activate(torch.ones(1, 1), "silu", False)
    return kernels.name, kernels.reason, round(float(out), 5)
results = [load(sys.argv[1], "auto"), load(sys.argv[1], "native"), load(sys.argv[2], "native")]
runtimes = {l.split()[-1] for l in open("/proc/self/maps") if "omp" in l.split()[-1]}
print(json.dumps([*results, sorted(runtimes)]))
"""


@pytest.mark.slow
def test_without_a_compiler_pytorch_takes_over_and_a_cached_library_loads(tmp_path: Path) -> None:
    """The OpenMP runtime is torch's, the only one of the process."""
    cached = share_kernels(tmp_path / "cached")
    done = subprocess.run(
        [sys.executable, "-c", _LOADER, str(tmp_path), str(cached)],
        env={**os.environ, "PATH": str(tmp_path)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    auto, native, from_cache, (runtime,) = json.loads(done.stdout)
    assert auto == ["aten", "no C++ compiler: g++ is not on PATH", 0.73106]
    assert native.startswith("no C++ compiler")
    assert from_cache == ["native", "loaded from the cache", 0.73106]
    assert "torch" in runtime


def test_an_unwritable_store_gets_a_private_build(compiler: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    kernels = kernel_set._load([blocker / "rbln" / "kernels"])
    assert kernels.reason.startswith("built for this process")
    assert kernels.library is not None
    assert not kernels.library.exists()


def test_a_library_built_ahead_spares_the_build(compiler: Path, tmp_path: Path) -> None:
    levels = [level.name for level in LEVELS if level.runs_here()]
    built = build_variants(tmp_path, ["portable", levels[0]])
    assert len(built) == 2
    assert compiler.read_text() == "link\nlink\n"
    store = kernel_store(tmp_path)
    assert kernel_set.find_built([store]) == (built[0], f"built ahead for CPUs with {levels[0]}")
    (built[0] / "librbln_emulator.so").write_bytes(b"damaged")
    found = kernel_set.find_built([store])
    assert found == (built[1], "built ahead for CPUs with portable")
    build.find_or_build(store / build.build_key())
    native = store / build.build_key()
    assert kernel_set.find_built([store]) == (native, "loaded from the cache")
    # A damaged one for this CPU is not replaced by one for less.
    (native / "librbln_emulator.so").write_bytes(b"damaged")
    assert kernel_set.find_built([store]) is None
    with pytest.raises(SystemExit):
        build.main(["--into", str(tmp_path), "--variants", "sse9"])


def test_a_library_that_cannot_be_loaded_is_built_for_the_process(
    compiler: Path, tmp_path: Path, native_kernels: Path
) -> None:
    """As one would be that was linked against a newer C library."""
    store = kernel_store(tmp_path)
    store.mkdir(parents=True)
    strange = b"no ELF file"
    publish(
        store / build.build_key(),
        {"librbln_emulator.so": strange, "library.json": make_record(strange, "native")},
    )
    kernels = kernel_set._load([store])
    assert kernels.reason.startswith("built for this process: the library in ")


def test_the_key_does_not_say_where_torch_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    key = build.build_key()
    monkeypatch.setattr(build, "_torch_folder", lambda: Path("/elsewhere/torch"))
    assert build.build_key() == key


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("level", build.buildable_levels(), ids=lambda level: level.name)
def test_no_level_compiles_with_a_warning(level: build.Target) -> None:
    """Those that other tests run on are built so as well; kept, so that a change alone compiles."""
    target = strict(level)
    assert kernel_files.is_intact(build.find_or_build(SHARED / build.build_key(target), target)[0])


def test_the_key_covers_every_file_and_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_SOURCE_DIR", tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "one" / "a.cpp").write_text("int a;")
    keys = [build.build_key()]
    (tmp_path / "one" / "a.h").write_text("int b;")
    keys.append(build.build_key())
    (tmp_path / "one" / "a.h").rename(tmp_path / "two" / "a.h")
    keys.append(build.build_key())
    (tmp_path / "README.md").write_text("Not a source.")
    assert build.build_key() == keys[-1]
    assert len(set(keys)) == 3


def test_levels_are_those_of_the_machine_and_of_what_the_cpu_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names() -> list[str]:
        return [level.name for level in LEVELS if level.runs_here()]

    listed = frozenset("sse2 avx2 fma f16c bmi1 bmi2 movbe abm avx512f avx512_bf16".split())
    monkeypatch.setattr(build, "cpu_features", lambda: listed)
    assert names() == ["avx2", "portable"]
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    assert names() == []
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset(("asimd", "fp")))
    assert names() == [level.name for level in build.buildable_levels()] == ["neon"]


# ------------------------------------------------------------------------------------- build killed
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


def test_compilers_end_with_the_build() -> None:
    with build._compilers() as group:
        # As a compiler that outlives g++, after a time-out.
        left = subprocess.Popen(["sleep", "600"], process_group=group)
    assert left.wait(5) == -signal.SIGKILL


# -------------------------------------------------------------------------------------- build trust
PLANTED = b"code of another user"


@pytest.fixture
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


@pytest.mark.usefixtures("home")
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


@pytest.mark.usefixtures("home")
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


@pytest.mark.usefixtures("home")
def test_without_a_place_of_its_own_the_process_builds_for_itself(
    shared: Path, home: Path, quick_build: None
) -> None:
    home.chmod(0o777)
    kernels = kernel_set._load([shared, *private_stores()])
    assert kernels.reason.startswith("built for this process: others may write ")
    assert kernels.library is not None
    assert not kernels.library.exists()


@pytest.mark.usefixtures("home")
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


@pytest.mark.usefixtures("home")
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


@pytest.mark.usefixtures("home")
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


# ----------------------------------------------------------------------------------------- variants
# The kernels for CPUs that are not here: AVX-512 by a stand-in of its intrinsics, and portable.
#
# Each runs the numeric tests of the others in a process of its own.
HERE = Path(__file__).parent
NUMERICS = (
    *"test_linear test_attention test_e4m3_cache test_window_attention".split(),
    *"test_sampling test_moe test_quantized".split(),
)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_numerics(variant: str) -> None:
    files = [str(HERE / f"{name}.py") for name in NUMERICS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--kernel-variant={variant}", *files],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
