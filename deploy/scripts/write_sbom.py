"""Write a software bill of materials of an environment as CycloneDX JSON.

Run it with the Python of that environment. Locks have the digest of each installed file;
`--dpkg-status` is the list of a system's Debian packages. Only run-time packages are imported. The
output has no date or serial number, so the same environment gives the same bytes.
"""

from __future__ import annotations

import argparse
import email
import json
import platform
import re
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement

PROJECT = "rbln-serve"
_LONGEST_LICENCE = 100

Component = dict[str, Any]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _digests(locks: list[Path]) -> dict[tuple[str, str], str]:
    """Return the SHA-256 of each locked package's file, by name and version.

    A lock names the file of x86-64 first, then that of aarch64 if it is another one.
    """
    one = r" --hash=sha256:([0-9a-f]{64})"
    pin = re.compile(rf"^([\w.-]+)==(\S+){one}(?:{one})?$", re.MULTILINE)
    found = (match for lock in locks for match in pin.findall(lock.read_text(encoding="utf-8")))
    arm = platform.machine() == "aarch64"
    return {
        (_normal(name), version): (arm and other) or first for name, version, first, other in found
    }


def _purl(kind: str, name: str, version: str, qualifiers: str = "") -> str:
    return f"pkg:{kind}/{name}@{quote(version, safe=':~')}{qualifiers}"


def _licences(package: Distribution) -> list[dict[str, Any]]:
    """Return the licences that a package declares, without whole texts."""
    about = package.metadata
    if expression := about.get("License-Expression"):
        return [{"expression": expression}]
    declared = (about.get("License") or "").strip()
    if declared and "\n" not in declared and len(declared) <= _LONGEST_LICENCE:
        return [{"license": {"name": declared}}]
    classifiers = [line for line in about.get_all("Classifier") or [] if line.startswith("License")]
    return [{"license": {"name": line.rpartition(" :: ")[2]}} for line in classifiers]


def _python_component(package: Distribution, digests: dict[tuple[str, str], str]) -> Component:
    name, version = _normal(package.metadata["Name"]), package.version
    # A package built from a folder is on no index.
    kind = "generic" if package.read_text("direct_url.json") else "pypi"
    purl = _purl(kind, name, version)
    component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if digest := digests.get((name, version)):
        component["hashes"] = [{"alg": "SHA-256", "content": digest}]
    if licences := _licences(package):
        component["licenses"] = licences
    return component


def _debian_components(status: Path) -> list[Component]:
    found = []
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        about = email.message_from_string(paragraph)
        if about.get("Status") != "install ok installed":
            continue
        name, version, architecture = (about[key] for key in ("Package", "Version", "Architecture"))
        purl = _purl("deb/debian", quote(name), version, f"?arch={architecture}")
        found.append(
            {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        )
    return found


def _dependencies(
    packages: dict[str, Distribution], components: dict[str, Component]
) -> list[dict[str, Any]]:
    """Return the dependencies between installed packages."""
    found = []
    for name, package in packages.items():
        lines = [Requirement(line) for line in package.requires or []]
        needed = {_normal(one.name) for one in lines if one.marker is None or one.marker.evaluate()}
        references = sorted(components[one]["bom-ref"] for one in needed & components.keys())
        found.append({"ref": components[name]["bom-ref"], "dependsOn": references})
    return sorted(found, key=lambda entry: str(entry["ref"]))


def describe(locks: list[Path], status: Path | None) -> dict[str, Any]:
    """Return the bill of materials of this process's environment."""
    digests = _digests(locks)
    packages = {_normal(package.metadata["Name"]): package for package in distributions()}
    components = {name: _python_component(one, digests) for name, one in packages.items()}
    project = components[PROJECT] | {"type": "application"}
    purl = _purl("generic", "python", platform.python_version())
    interpreter = {"type": "platform", "bom-ref": purl, "name": "python", "purl": purl}
    interpreter["version"] = platform.python_version()
    others = [one for name, one in components.items() if name != PROJECT]
    others += [interpreter, *(_debian_components(status) if status else ())]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": project},
        "components": sorted(others, key=lambda one: str(one["bom-ref"])),
        "dependencies": _dependencies(packages, components),
    }


def main() -> None:
    """Parse the command line and write the bill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("locks", type=Path, nargs="*", help="installed locks")
    parser.add_argument("--dpkg-status", type=Path, help="a system's /var/lib/dpkg/status")
    options = parser.parse_args()
    bill = describe(options.locks, options.dpkg_status)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
