"""Puts the front process together: estimates, starts of models' processes, the event loop."""

from __future__ import annotations

import json
import logging
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from server.commands.several_models.command import FRONT_SETTINGS, adapter_names
from server.host.importing import without_garbage_collection
from server.host.tasks import in_thread
from server.model_pool.model_process import ModelProcess
from server.model_pool.models_file import ModelEntry, ModelsFile
from server.model_pool.template import ProcessTemplate, TemplateError
from server.settings import ServerSettings, SettingsError, environment_of_model

logger = logging.getLogger(__name__)

_MIB = 1 << 20


class ModelStarter:
    """Starts the processes of models and estimates their memory."""

    def __init__(
        self,
        settings: ServerSettings,
        argv: Mapping[str, list[str]],
        template: ProcessTemplate,
        run_dir: Path,
    ) -> None:
        self._settings = settings
        self._argv = argv
        self._template = template
        self._run_dir = run_dir
        self._numbers = {name: number for number, name in enumerate(argv)}

    async def start(self, entry: ModelEntry) -> ModelProcess:
        """Start the model's process. Raises `TemplateError`."""
        address = self._run_dir / f"model-{self._numbers[entry.name]}.sock"
        address.unlink(missing_ok=True)
        command = await self._template.start(
            self._argv[entry.name], self._environment(entry, uds=address)
        )
        return ModelProcess(command, address, self._settings.drain_timeout_s)

    async def needed_bytes(self, entry: ModelEntry) -> int:
        """Return the estimate of `rbln-serve check`. Raises `SettingsError` for its refusal."""
        with tempfile.TemporaryFile() as output:
            try:
                command = await self._template.start(
                    ["check", *self._argv[entry.name][1:], "--json"],
                    self._environment(entry),
                    output.fileno(),
                )
            except TemplateError as error:
                raise SettingsError(str(error)) from None
            status = await command.ended
            output.seek(0)
            text = output.read().decode()
        report = json.loads(text) if text.startswith("{") else {}
        if status or not report.get("ok"):
            reason = report.get("reason") or "its flags are wrong, see above"
            raise SettingsError(f"the model {entry.name!r} cannot be served: {reason}")
        return int(report["memory"]["needed_bytes"])

    def _environment(self, entry: ModelEntry, uds: Path | None = None) -> dict[str, str]:
        """Return the environment of a model's process: the settings that are not the front's."""
        settings = self._settings
        values: dict[str, object] = {
            "uds": uds,
            "run_root": self._run_dir,
            "console": False,
            "open_metrics": True,
        }
        if settings.data_dir is not None:
            values["data_dir"] = settings.data_dir / entry.folder
        return environment_of_model(settings, FRONT_SETTINGS, values)


def check_budget(file: ModelsFile, needed_bytes: Mapping[str, int]) -> None:
    """Raise `SettingsError` unless the pinned models and each other one fit together."""
    pinned = sum(needed_bytes[entry.name] for entry in file.models if entry.pinned)
    left = file.budget_bytes - pinned
    if left < 0:
        raise SettingsError(
            f"the pinned models need about {pinned // _MIB} MiB together, and memory_gib is "
            f"{file.budget_bytes // _MIB} MiB"
        )
    for entry in file.models:
        needed = needed_bytes[entry.name]
        if not entry.pinned and needed > left:
            raise SettingsError(
                f"the model {entry.name!r} needs about {needed // _MIB} MiB, and memory_gib leaves "
                f"{left // _MIB} MiB beside the pinned models: raise it, or lower the model's "
                "--kv-cache-memory-bytes"
            )


def run_front(
    settings: ServerSettings,
    file: ModelsFile,
    argv: Mapping[str, list[str]],
    template: ProcessTemplate,
    listener: socket.socket,
    run_dir: Path,
    started_at: float,
) -> int:
    """Serve until the end and return the exit code."""
    with without_garbage_collection():
        from asyncio import Runner

        import uvloop

        from server.engine.launch import component_versions
        from server.model_pool.front.service import serve_front
        from server.model_pool.pool import ModelPool

    starter = ModelStarter(settings, argv, template, run_dir)

    async def serve() -> int:
        pool = ModelPool(file, starter.start)
        for model in pool.models.values():
            model.adapters = adapter_names(model.entry)

        async def prepare() -> None:
            await in_thread(lambda: _make_folders(settings, file))
            for entry in file.models:
                if entry.stated_bytes is None:
                    pool.models[entry.name].needed_bytes = await starter.needed_bytes(entry)
            needed = {name: model.needed_bytes for name, model in pool.models.items()}
            check_budget(file, needed)
            for name, size in needed.items():
                logger.info("the model %s needs about %d MiB", name, size // _MIB)

        return await serve_front(
            settings, pool, listener, run_dir, started_at, component_versions(), prepare
        )

    with Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(serve())
        except SettingsError as error:
            raise SystemExit(f"rbln-serve: {error}") from None


def _make_folders(settings: ServerSettings, file: ModelsFile) -> None:
    """Create the models' folders below --data-dir."""
    if (top := settings.data_dir) is None:
        return
    try:
        for entry in file.models:
            (top / entry.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{top} cannot be used: {error}") from None
