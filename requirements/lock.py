"""Resolves cpu.in, dev.in and site.in into locks: `python requirements/lock.py [--upgrade]`.

Run it with Python 3.11. Versions that are locked already stay unless --upgrade is given, so that
adding one package moves nothing else. A line marked `# no-deps` is taken without its requirements.

A lock holds one version of each package with the SHA-256 of a file for each CPython (3.11 to 3.13)
on x86-64 Linux, and in cpu.lock for aarch64 as well; one hash where all of them share a file. The
suite runs on CPython 3.11 on x86-64. Wheels alone: to build a source release would run its code,
and fetch what nothing here pins.
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
# Late releases: some packages do not run on the first ones.
_PYTHONS = ("3.11.9", "3.12.9", "3.13.9")
# The newest glibc whose wheels are taken for other machines than this: Debian 12's.
_GLIBC = 36
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


def _add_hashes(pins: dict[str, str], machines: tuple[str, ...]) -> dict[str, str]:
    """Return the lines of `pins` with the hashes of the wheels for every Python and machine."""
    exact = [line.split()[0] for line in pins.values()]
    hashes = {package: line.split()[1:] for package, line in pins.items()}
    for python in _PYTHONS:
        for machine in machines:
            platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(17, _GLIBC + 1)]
            with tempfile.TemporaryDirectory() as folder:
                options = ["--no-deps", "--target", folder, "--python-version", python]
                for name in (*platforms, f"manylinux2014_{machine}"):
                    options += ["--platform", name]
                others = _resolve(exact, [], *options)
            for package, line in others.items():
                hashes[package] += [one for one in line.split()[1:] if one not in hashes[package]]
    return {
        package: " ".join((line.split()[0], *hashes[package])) for package, line in pins.items()
    }


def _locked(path: Path) -> list[str]:
    """Return the versions of a lock; with the hashes pip would want one of whatever it resolves."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line and not line.startswith("#")]


def _lock(name: str, base: list[str], machines: tuple[str, ...], *, upgrade: bool) -> None:
    """Write <name>.lock: everything <name>.in needs that `base` does not hold already."""
    target = HERE / f"{name}.lock"
    constraints = base + ([] if upgrade else _locked(target))
    resolved, alone = _requirements(HERE / f"{name}.in")
    pins = _resolve(resolved, constraints) | _resolve(alone, constraints, "--no-deps")
    base_names = {_normal(line.split("==")[0]) for line in base}
    pins = {package: line for package, line in pins.items() if package not in base_names}
    pins = _add_hashes(pins, machines)
    lines = [pins[package] for package in sorted(pins)]
    header = f"# Made by requirements/lock.py from {name}.in for deploy/scripts/install.sh."
    target.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    sys.stdout.write(f"{target.relative_to(HERE)}: {len(lines)} packages\n")


def main() -> None:
    """Write the locks: dev.lock on top of the service's, site.lock for its own environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest that is allowed")
    upgrade: bool = parser.parse_args().upgrade
    _lock("cpu", [], ("x86_64", "aarch64"), upgrade=upgrade)
    _lock("dev", _locked(HERE / "cpu.lock"), ("x86_64",), upgrade=upgrade)
    _lock("site", [], ("x86_64",), upgrade=upgrade)


if __name__ == "__main__":
    main()
