"""Build a wheel with the kernels of all CPU levels: `build_wheel.py OUT [LEVEL...]`.

Run it with the Python of an environment that has torch and setuptools, and with g++. The wheel's
platform tag names the newest glibc that a kernel library needs. Libraries are kept in build/wheel,
so only changed kernels are compiled again.
"""

from __future__ import annotations

import logging
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build/wheel"
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "server", "rbln_backend")
_MODEL = "default_model/checkpoint"
_LEVELS = ("avx512_bf16", "avx512", "avx2")
# That of torch's wheels; a library may need a newer one.
_OLDEST_GLIBC = (2, 28)
_GLIBC = re.compile(rb"\(GLIBC_(\d+)\.(\d+)(?:\.\d+)?\)")
_NOT_SOURCE = shutil.ignore_patterns("__pycache__", "prebuilt")


def platform_tag(libraries: list[Path]) -> str:
    """Return the tag of Linux with the glibc whose symbols the libraries use."""
    found = {_OLDEST_GLIBC}
    for library in libraries:
        table = subprocess.run(["objdump", "-T", library], capture_output=True, check=True).stdout
        found |= {(int(major), int(minor)) for major, minor in _GLIBC.findall(table)}
    major, minor = max(found)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def _copy_sources(target: Path) -> None:
    """Copy what a wheel is built from; setuptools leaves folders beside what it builds."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=_NOT_SOURCE)
        else:
            shutil.copy(ROOT / name, target / name)
    shutil.copytree(ROOT / _MODEL, target / _MODEL)


def build(out: Path, levels: list[str]) -> None:
    """Build the kernels, then the wheel into ``out``."""
    sys.path.insert(0, str(ROOT))
    from rbln_backend.devices.emulated.build import LIBRARY, build_variants

    entries = build_variants(WORK / "kernels", levels)
    source = WORK / "source"
    _copy_sources(source)
    for entry in entries:
        shutil.copytree(entry, source / "rbln_backend/devices/emulated/prebuilt" / entry.name)
    tag = platform_tag([entry / LIBRARY for entry in entries])
    command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    command += [f"--config-settings=--build-option=--plat-name={tag}", str(source)]
    subprocess.run(command, check=True)


def main() -> None:
    """Read the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out, *levels = sys.argv[1:]
    build(Path(out), levels or list(_LEVELS))


if __name__ == "__main__":
    main()
