"""`rbln-serve serve --models FILE`: reads the file, then serves its models on one port."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from server.commands.command_line.server_flags import server_parser, split
from server.commands.command_line.setting_flags import flag_of
from server.commands.several_models.template_process import serve_forks
from server.lora.state_file import STATE_FILE
from server.model_pool.choice.adapter_names import AdapterNames
from server.model_pool.models_file import ModelEntry, ModelsFile, read_models_file
from server.model_pool.template import ProcessTemplate
from server.setting_groups.http import AccessSettings, ConnectionSettings, ListenSettings
from server.settings import ServerSettings, SettingsError, export_log_level, export_service_name

FRONT_SETTINGS = (
    *ListenSettings.model_fields,
    *ConnectionSettings.model_fields,
    *("data_dir", "run_root", "console", "open_metrics"),
)
"""Settings of the front process; those of a model's process are set by it."""
_SHARED_SETTINGS = (*FRONT_SETTINGS, *AccessSettings.model_fields)
"""Settings that cannot differ between models."""
_OF_ONE_MODEL = ("lora_root", "lora_state_file")
"""Settings that only a model's own flags may have."""
_NOT_IN_FLAGS = ("--served-model-name", "--config", "--model")
_NOT_COMMON = (*_NOT_IN_FLAGS, "--lora-modules")


def serve_models(
    parser: argparse.ArgumentParser, settings: ServerSettings, common: Sequence[str]
) -> int:
    """Serve the models of `settings.models`; `common` are vLLM's flags for each of them."""
    assert settings.models is not None
    try:
        file = read_models_file(settings.models)
        _check_common(settings, common)
        argv = {entry.name: _argv(entry, common) for entry in file.models}
    except SettingsError as error:
        parser.error(str(error))
    return _run(settings, file, argv)


def _check_common(settings: ServerSettings, common: Sequence[str]) -> None:
    """Raise `SettingsError` for what cannot be the same for several models."""
    for name in _OF_ONE_MODEL:
        if name in settings.model_fields_set and getattr(settings, name) is not None:
            raise SettingsError(
                f"{flag_of(name)} cannot be shared by several models: put it into the `flags` of "
                "a model"
            )
    for word in common:
        if (flag := _flag(word)) in _NOT_COMMON:
            raise SettingsError(f"{flag} cannot be used with --models")


def _argv(entry: ModelEntry, common: Sequence[str]) -> list[str]:
    """Return the command line of a model's process; later flags win. Raises `SettingsError`."""
    words = [entry.path, *entry.flags]
    ours, _ = split(server_parser("serve"), words)
    wrong = [flag_of(name) for name in ours if name in _SHARED_SETTINGS]
    wrong += [flag for flag in map(_flag, entry.flags) if flag in _NOT_IN_FLAGS]
    if wrong:
        raise SettingsError(
            f"the flags of the model {entry.name!r} contain {wrong[0]}, which is not a flag of "
            "one of several models"
        )
    return ["serve", entry.path, *common, *entry.flags, "--served-model-name", entry.name]


def adapter_names(entry: ModelEntry) -> AdapterNames:
    """Return the names of the model's adapters."""
    ours, _ = split(server_parser("serve"), [entry.path, *entry.flags])
    file, root = ours.get("lora_state_file"), ours.get("lora_root")
    if file is None and root is not None:
        file = Path(str(root)) / STATE_FILE
    return AdapterNames(entry.flags, None if file is None else Path(str(file)))


def _flag(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _run(settings: ServerSettings, file: ModelsFile, argv: dict[str, list[str]]) -> int:
    from rbln_backend.host.process_life import outlive_readers
    from server.commands.serving import listen_or_exit, process_start
    from server.host.run_folder import run_folder

    outlive_readers()
    export_log_level(settings)
    export_service_name()
    listener = listen_or_exit(settings)
    with run_folder(settings.run_root) as run_dir:
        template = ProcessTemplate(serve_forks, close=[listener])
        try:
            from server.commands.several_models.front import run_front

            return run_front(settings, file, argv, template, listener, run_dir, process_start())
        finally:
            template.close()
