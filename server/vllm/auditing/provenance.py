"""Header of each file of an audit log: what computed the answers after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbln_backend.api.models import weights_digest
from rbln_backend.api.reports import GRAPH_KEYS, read_descriptions
from rbln_backend.errors import ConfigError
from server.audit.log_files import AuditLogError, LogFiles, LogLimits
from server.audit.writer import AuditWriter, timestamp
from server.frontend import LaunchError
from server.host.tasks import in_daemon_thread
from server.vllm.auditing.answers import AuditLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from server.settings import ServerSettings

COMPARED = ("weights", "dtype", "device", "versions", "graphs")
"""Fields of a header that replay compares; of equal ones, equal tokens are promised."""

_SECRETS = ("--hf-token", "--hf_token")


class Provenance:
    """Identity of the engine: model, weights, device, kernels and graphs.

    Reading the weights takes about a second for each GB; it starts with the object, in a thread.
    """

    def __init__(
        self,
        config: VllmConfig,
        argv: Sequence[str],
        versions: Mapping[str, str],
        run_dir: Path,
    ) -> None:
        """`run_dir` is that of the engine's descriptions, `argv` the engine's command line."""
        model = config.model_config
        self._fields: dict[str, Any] = {
            "model": model.model,
            "argv": without_secrets(argv),
            "dtype": str(model.dtype).removeprefix("torch."),
            "versions": dict(versions),
        }
        self._run_dir = run_dir
        load_format = str(config.load_config.load_format)
        self._weights = in_daemon_thread(
            partial(weights_digest, model.model, load_format, model.seed)
        )
        self.fields: Callable[[], Mapping[str, Any]] = cache(self._read)

    def check(self) -> None:
        """Wait for the digest of the weights. Raises `LaunchError` for a model without files."""
        try:
            self._weights.result()
        except (ConfigError, OSError) as error:
            raise LaunchError(f"--audit-log: {error}") from error

    def _read(self) -> Mapping[str, Any]:
        ranks = read_descriptions(self._run_dir)
        report: Mapping[str, Any] = ranks[0] if ranks else {}
        device = report.get("device") or {}
        library = device.get("library")
        return {
            **self._fields,
            "weights": self._weights.result(),
            "ranks": len(ranks),
            "device": {
                **{name: device.get(name) for name in ("name", "npu", "kernels", "isa")},
                # The folder's name is the digest of the kernels' sources and compiler.
                "build": None if library is None else Path(library).parent.name,
            },
            "graphs": report.get(GRAPH_KEYS, {}),
        }


MAIN_LOG = "main"
"""Folder of the main process's log, with several HTTP processes."""


def open_audit_log(
    settings: ServerSettings,
    config: VllmConfig,
    argv: Sequence[str],
    versions: Mapping[str, str],
    run_dir: Path,
) -> AuditLog | None:
    """Open the log of `--audit-log`, None without one. Raises `LaunchError`."""
    if settings.audit_log is None:
        return None
    provenance = Provenance(config, argv, versions, run_dir)
    name = MAIN_LOG if settings.api_server_count > 1 else None
    return _open(settings, name, provenance.fields, provenance.check)


def open_process_log(
    settings: ServerSettings, index: int, fields: Mapping[str, Any] | None
) -> AuditLog | None:
    """Open the log of HTTP process `index`, None without `fields`, those of the header.

    Each process has a chain of its own, and its share of the bytes. Raises `LaunchError`.
    """
    if fields is None:
        return None
    return _open(settings, f"http-{index}", lambda: fields, lambda: None)


def _open(
    settings: ServerSettings,
    name: str | None,
    fields: Callable[[], Mapping[str, Any]],
    settle: Callable[[], None],
) -> AuditLog:
    assert settings.audit_log is not None
    root = settings.audit_log if name is None else settings.audit_log / name
    logs = 1 if name is None else settings.api_server_count + 1
    limits = LogLimits(
        settings.audit_file_bytes, settings.audit_max_bytes // logs, settings.audit_retention_s
    )
    try:
        files = LogFiles(root, limits)
    except AuditLogError as error:
        raise LaunchError(str(error), exit_code=2) from error

    def header() -> Mapping[str, Any]:
        return {"kind": "server", "time": timestamp(), **fields()}

    writer = AuditWriter(files, header, settings.audit_on_full, settings.audit_queue_records)
    return AuditLog(writer, settings.audit_content, settle, fields)


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return a command line without vLLM's flags that hold secrets."""
    words = list(argv)
    for name in _SECRETS:
        while name in words:
            place = words.index(name)
            del words[place : place + 2]
    return [word for word in words if not word.startswith(tuple(f"{n}=" for n in _SECRETS))]
