"""What the environment says that it is made of, judged by CycloneDX's own schema."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from tests.architecture.source_tree import ROOT
from tests.image.test_dockerfile import words_of
from tests.image.test_scripts import run

_STATUS = """\
Package: tini
Status: install ok installed
Architecture: amd64
Version: 0.19.0-1+b3
Description: tiny but valid init for containers
 A line of more.

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1:2.0~rc1
"""


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sbom")
    (folder / "status").write_text(_STATUS)
    run("write_sbom.sh", sys.prefix, str(folder / "new" / "bill"), str(folder / "status"))
    return folder / "new" / "bill"


@pytest.fixture(scope="module")
def components(bill: Path) -> dict[str, dict[str, Any]]:
    content = json.loads(bill.read_text())
    return {one["purl"]: one for one in (*content["components"], content["metadata"]["component"])}


def _pins() -> dict[str, str]:
    """Digest by package URL."""
    found = {}
    for name in ("torch.txt", "cpu.lock", "dev.lock"):
        text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
        for package, version, digest, _ in re.findall(
            r"^(\S+)==(\S+) --hash=sha256:(\w+)( --hash=sha256:\w+)?$", text, re.M
        ):
            found[f"pkg:pypi/{package}@{version.replace('+', '%2B')}"] = digest
    return found


def test_it_follows_the_schema(bill: Path) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(bill.read_text()) is None
    wrong = bill.read_text().replace('"SHA-256"', '"SHA-255"')
    assert validator.validate_str(wrong) is not None


def test_it_has_what_is_installed_with_the_hash_of_what_is_locked(
    components: dict[str, dict[str, Any]],
) -> None:
    hashed = {
        purl: one["hashes"][0]["content"] for purl, one in components.items() if "hashes" in one
    }
    assert hashed == _pins()
    installed = {
        (re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower(), package.version)
        # Not of `sys.path`, to which a test may have added what setuptools brings along.
        for package in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    }
    named = {(one["name"], one["version"]) for one in components.values()}
    assert installed <= named
    assert {name for name, _ in named - installed} == {"python", "tini"}


def test_package_urls_are_what_they_should_be(components: dict[str, dict[str, Any]]) -> None:
    for purl, one in components.items():
        parsed = PackageURL.from_string(purl)
        assert parsed.to_string() == purl
        assert parsed.version == one["version"]
    # Built from this repository, on no index.
    own = [purl for purl in components if purl.startswith("pkg:generic/")]
    # Python's own; an environment without `ensurepip` has it from the index, by its pin.
    own = [purl for purl in own if not purl.startswith("pkg:generic/pip@")]
    assert sorted(purl.partition("@")[0] for purl in own) == [
        *("pkg:generic/python", "pkg:generic/rbln-serve", "pkg:generic/vllm")
    ]


def test_licences_and_dependencies_are_named(
    bill: Path, components: dict[str, dict[str, Any]]
) -> None:
    silent = [purl for purl, one in components.items() if not one.get("licenses")]
    assert len(silent) < 10
    (torch,) = (one for purl, one in components.items() if purl.startswith("pkg:pypi/torch@"))
    assert "BSD-3-Clause" in torch["licenses"][0]["expression"]
    needed = {one["ref"]: one["dependsOn"] for one in json.loads(bill.read_text())["dependencies"]}
    (project,) = (purl for purl in components if purl.startswith("pkg:generic/rbln-serve@"))
    assert torch["bom-ref"] in needed[project]


def test_debian_packages_are_those_that_are_installed(
    components: dict[str, dict[str, Any]],
) -> None:
    debian = [purl for purl in components if purl.startswith("pkg:deb/")]
    assert debian == ["pkg:deb/debian/tini@0.19.0-1%2Bb3?arch=amd64"]


def test_the_same_environment_has_the_same_bytes(bill: Path, tmp_path: Path) -> None:
    run("write_sbom.sh", sys.prefix, str(tmp_path / "bill"), str(bill.parents[1] / "status"))
    assert (tmp_path / "bill").read_bytes() == bill.read_bytes()


def test_images_hold_theirs_and_no_tool_that_judges_it() -> None:
    copied = [words for words in words_of("COPY") if "/opt/sbom.cdx.json" in words]
    assert [words.split()[0] for words in copied] == [*("--from=sbom-npu", "--from=sbom-emulated")]
    assert "cyclonedx" not in (ROOT / "requirements/cpu.lock").read_text()
