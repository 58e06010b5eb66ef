"""Flags of `ServerSettings`, in groups, with types and defaults in their help."""

from __future__ import annotations

import argparse
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from server.settings import ENV_PREFIX, SECTIONS, ServerSettings

# Last words of names that say more than their type.
_METAVARS = {
    "s": "SECONDS",
    "root": "DIR",
    "dir": "DIR",
    "file": "FILE",
    "keyfile": "FILE",
    "certfile": "FILE",
    "certs": "FILE",
}
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting, in groups."""
    group: argparse._ActionsContainer = parser
    for name, field in ServerSettings.model_fields.items():
        if name in SECTIONS:
            group = parser.add_argument_group(SECTIONS[name])
        group.add_argument(flag_of(name), **_form(name, field), help=_help(name, field))


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def _form(name: str, field: FieldInfo) -> dict[str, Any]:
    """Return argparse's options of a setting: a switch, a repeatable flag, or a value."""
    if isinstance(field.default, bool):
        return {"action": argparse.BooleanOptionalAction}
    form = {"metavar": _metavar(name, field.annotation)}
    return form | {"action": "append"} if isinstance(field.default, tuple) else form


def _metavar(name: str, annotation: object) -> str:
    choices = _choices(annotation)
    if choices:
        return "{" + ",".join(choices) + "}"
    last = name.rpartition("_")[2]
    types_found = _types(annotation)
    if "bytes" in name.split("_"):
        return "BYTES"
    if last in _METAVARS and (last != "s" or types_found & {int, float}):
        return _METAVARS[last]
    if Path in types_found:
        return "PATH"
    if types_found & {int, float}:
        return "PORT" if name == "port" else "N"
    return last.removesuffix("s").upper()


def _choices(annotation: object) -> list[str]:
    """Return the values of a `Literal`, also inside of `Annotated`, unions and tuples."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _types(annotation: object) -> set[object]:
    """Return the types of which a value may be."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _types(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return {kind for part in get_args(annotation) for kind in _types(part)}
    return {annotation if origin is None else origin}


def _help(name: str, field: FieldInfo) -> str:
    notes = [f"default: {text}"] if (text := _default(name, field.default)) else []
    notes.append(ENV_PREFIX + name.upper())
    return f"{field.description} [{'; '.join(notes)}]".replace("%", "%%")


def _default(name: str, value: object) -> str:
    """Return a default as a user would write it; empty where nothing is set."""
    if value is None or value in ((), ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, int) and "bytes" in name.split("_"):
        for size, unit in _UNITS:
            if value >= size and value % size == 0:
                return f"{value}, {value // size} {unit}"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
