"""Resolves cpu.in, dev.in and site.in into locks: `python requirements/lock.py [--upgrade]`.

Run it with the Python that the service runs on, 3.11. Versions that are locked already stay unless
--upgrade is given, so that adding one package moves nothing else. A line marked `# no-deps` is
taken without its requirements. A later Python, which runs an installed wheel, writes the same
versions with the hashes of its own wheels: `python3.12 requirements/lock.py` makes
python3.12/cpu.lock.

A lock names one file of each package and architecture, by its SHA-256: the wheel for that CPython
on x86-64 Linux, where it was tested, and in cpu.lock the wheel for aarch64, where that is another
file. Wheels alone: to build a source release would run its code, and fetch what nothing here pins.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_VERSION = "{}.{}".format(*sys.version_info)
# The newest glibc whose wheels are taken on aarch64: Debian 12's.
_GLIBC = 36
_AARCH64 = [f"manylinux_2_{minor}_aarch64" for minor in range(17, _GLIBC + 1)]
_AARCH64 += ["manylinux2014_aarch64"]
NO_DEPS = re.compile(r"#\s*no-deps\s*$")


def _requirements(path: Path) -> tuple[list[str], list[str]]:
    """Return the lines of an .in file to resolve with and without their requirements."""
    resolved, alone = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        requirement = line.split("#")[0].strip()
        if requirement:
            (alone if NO_DEPS.search(line) else resolved).append(requirement)
    return resolved, alone


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _resolve(lines: list[str], constraints: list[str], *options: str) -> dict[str, str]:
    """Ask pip what it would install; returns normalised name -> ``name==version --hash=…``."""
    if not lines:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        wanted, bounds, report = (Path(folder) / name for name in ("in", "bounds", "report"))
        wanted.write_text("\n".join(lines), encoding="utf-8")
        bounds.write_text("\n".join(constraints), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--only-binary", ":all:"]
        command += ["--report", str(report), *options]
        subprocess.run([*command, "-r", str(wanted), "-c", str(bounds)], check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {_normal(item["metadata"]["name"]): _line(item) for item in found}


def _line(item: dict[str, Any]) -> str:
    name, version = _normal(item["metadata"]["name"]), item["metadata"]["version"]
    digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{name}=={version} --hash=sha256:{digest}"


def _add_aarch64(pins: dict[str, str]) -> dict[str, str]:
    """Return the lines of `pins` with the hashes of the wheels on aarch64 where they differ."""
    exact = [line.split()[0] for line in pins.values()]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--target", folder, "--python-version", _VERSION]
        options += [word for name in _AARCH64 for word in ("--platform", name)]
        others = _resolve(exact, [], *options)
    return {
        package: line if others[package] == line else f"{line} {others[package].split()[1]}"
        for package, line in pins.items()
    }


def _locked(path: Path) -> list[str]:
    """Return the versions of a lock; with the hashes pip would want one of whatever it resolves."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line and not line.startswith("#")]


def _lock(name: str, base: list[str], target: Path, *, upgrade: bool) -> None:
    """Write `target`: everything <name>.in needs that `base` does not hold already."""
    constraints = base + ([] if upgrade else _locked(HERE / f"{name}.lock"))
    resolved, alone = _requirements(HERE / f"{name}.in")
    pins = _resolve(resolved, constraints) | _resolve(alone, constraints, "--no-deps")
    held = {_normal(line.split("==")[0]) for line in base}
    pins = {package: line for package, line in pins.items() if package not in held}
    pins = _add_aarch64(pins) if name == "cpu" else pins
    lines = [pins[package] for package in sorted(pins)]
    header = f"# Made by requirements/lock.py from {name}.in for install_locked.sh."
    target.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    sys.stdout.write(f"{target.relative_to(HERE)}: {len(lines)} packages\n")


def main() -> None:
    """Write the locks: dev.lock on top of the service's, site.lock for its own environment.

    On a later Python: that of the service alone.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest that is allowed")
    upgrade: bool = parser.parse_args().upgrade
    if _VERSION != "3.11":
        folder = HERE / f"python{_VERSION}"
        folder.mkdir(exist_ok=True)
        _lock("cpu", [], folder / "cpu.lock", upgrade=False)
        return
    _lock("cpu", [], HERE / "cpu.lock", upgrade=upgrade)
    _lock("dev", _locked(HERE / "cpu.lock"), HERE / "dev.lock", upgrade=upgrade)
    _lock("site", [], HERE / "site.lock", upgrade=upgrade)


if __name__ == "__main__":
    main()
