"""Processes over the double, and readers of its call log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.architecture.source_tree import ROOT

FOLDER = Path(__file__).parent


def double_environment(log: Path, **settings: str | int | float | Iterable[str]) -> dict[str, str]:
    """This process's environment with the double first on the import path, and our tree second.

    ``settings`` are ``SDK_DOUBLE_*`` in small letters, such as ``off=["blocks"]`` or ``npu=""``.
    """
    settings = {
        f"SDK_DOUBLE_{name.upper()}": str(value)
        if isinstance(value, str | int | float)
        else ",".join(value)
        for name, value in settings.items()
    }
    version = settings.get("SDK_DOUBLE_VERSION")
    folders = [FOLDER, ROOT]
    if version:
        folders.append(install_metadata(log.parent / "sdk", version))
    paths = os.pathsep.join(map(str, folders))
    return dict(os.environ) | {"PYTHONPATH": paths, "SDK_DOUBLE_LOG": str(log)} | settings


def install_metadata(folder: Path, version: str) -> Path:
    """Write what pip knows of an SDK of ``version`` below ``folder``, to be put on the path."""
    installed = folder / version / f"rebel_compiler-{version}.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(f"Name: rebel-compiler\nVersion: {version}\n")
    return installed.parent


def read_log(log: Path, call: str | None = None) -> list[dict[str, Any]]:
    """Lines of the log in order, those of one ``call`` if it is given."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line for line in lines if call in (None, line["call"])]


def rule_table() -> dict[str, str]:
    """Each rule's name and whose it is, ``vendor`` or ``ours``."""
    done = subprocess.run(
        [sys.executable, "-c", "from rebel.rules import table; print(table())"],
        env=dict(os.environ) | {"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    return {name: source for name, source, _ in rows}
