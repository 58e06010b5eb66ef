"""Cached results of the references, under keys of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rbln_backend.host.vllm_build import vllm_build
from rbln_backend.parity.checkpoint_folder import checkpoint_folder
from rbln_backend.parity.job import Job, SideResult

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def result_key(job: Job, environ: Mapping[str, str]) -> str:
    """Return 64 hexadecimal digits: model files, job, environment, versions, machine."""
    packages = ("rbln-serve", vllm_build().distribution, "torch", "transformers")
    settings = {name: value for name, value in environ.items() if name.startswith("VLLM_")}
    fields = {
        "job": asdict(job),
        "model": _model_identity(job.model),
        "lora": None if job.lora is None else _identity(Path(job.lora)),
        "environ": settings,
        "versions": {name: version(name) for name in packages},
        "machine": [platform.machine(), _cpu_name()],
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _model_identity(model: str) -> list[list[Any]] | str | None:
    """Return the files of a folder, or the commit of a hub name; None if it is unknown."""
    if Path(model).is_dir():
        return _identity(Path(model))
    snapshot = checkpoint_folder(model)
    return None if snapshot is None else snapshot.name


def _identity(folder: Path) -> list[list[Any]]:
    """Return the identity of all files: weights by size and time, others by content."""
    return [_file_identity(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def _file_identity(path: Path, folder: Path) -> list[Any]:
    name, facts = str(path.relative_to(folder)), path.stat()
    if path.suffix in _WEIGHTS:
        return [name, facts.st_size, facts.st_mtime_ns]
    return [name, hashlib.sha256(path.read_bytes()).hexdigest()]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("model name", "CPU part"))), "")


class ResultCache:
    """A folder of results. An unreadable file counts as missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: str) -> SideResult | None:
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            return SideResult.read(path)
        except (OSError, ValueError, KeyError):
            return None

    def store(self, key: str, result: SideResult) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        result.write(self.path(key))

    def path(self, key: str) -> Path:
        return self._folder / f"reference-{key[:32]}.npz"
