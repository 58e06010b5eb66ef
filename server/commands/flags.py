"""Flags of the commands: settings, and the names of vLLM's flags.

vLLM's parser takes seconds to import. Its flag names are therefore kept in a text file, one flag a
line, which `python -m deploy.upstream.flag_names` writes.
"""

from __future__ import annotations

import argparse
import difflib
import re
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from server.observability.logging import configure
from server.settings import ENV_PREFIX, SECTIONS, ServerSettings, SettingsError, load_settings
from server.vllm.flag_table import RENAMED_FLAGS

SERVE_FLAGS = Path(__file__).with_name("vllm_serve_flags.txt")
"""File of the flags of `vllm serve`."""

_SHORT = re.compile(r"-[A-Za-z]")


class UnknownFlagError(ValueError):
    """A flag that no parser knows; the message suggests the nearest one."""


def vllm_flags() -> frozenset[str]:
    return frozenset(SERVE_FLAGS.read_text(encoding="ascii").split())


def require_known(
    argv: Sequence[str], known: Collection[str], suggested: Collection[str] = ()
) -> None:
    """Raise `UnknownFlagError` for the first flag of `argv` that is not `known`.

    As argparse does, accept a prefix that only one known flag has. `suggested` adds flags that a
    suggestion may name.
    """
    for name in _flags_in(argv):
        if name in known:
            continue
        if not name.startswith("--"):
            # Values may be attached, as in -tp2 and -O3.
            if not any(flag.startswith(name) or name.startswith(flag) for flag in _short(known)):
                raise UnknownFlagError(_unknown(name, [*known, *suggested]))
            continue
        longer = sorted(flag for flag in known if flag.startswith(name))
        if not longer:
            raise UnknownFlagError(_unknown(name, [*known, *suggested]))
        if len(longer) > 1:
            raise UnknownFlagError(f"{name}: ambiguous flag; could be {', '.join(longer)}")


def nearest(word: str, known: Collection[str]) -> str:
    """Return the end of a message: the nearest of the `known` words, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _unknown(name: str, known: Collection[str]) -> str:
    return f"{name}: unknown flag{nearest(name, known) or '; --help lists the flags'}"


def _flags_in(argv: Sequence[str]) -> Iterator[str]:
    """Yield the flags of `argv` with dashes, without values and without keys of JSON flags."""
    for word in argv:
        if word == "--":
            return
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        is_flag = word.startswith("--") or _SHORT.match(word) is not None
        # argparse takes a word with a space for a value.
        if is_flag and " " not in name:
            yield name


def _short(known: Collection[str]) -> Iterator[str]:
    yield from (flag for flag in known if not flag.startswith("--"))
    # vLLM replaces this one before its parser runs.
    yield "-O"


# Last words of names that say more than their type.
_METAVARS = {
    "s": "SECONDS",
    **dict.fromkeys(("root", "dir"), "DIR"),
    **dict.fromkeys(("file", "keyfile", "certfile", "certs"), "FILE"),
}
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    group: argparse._ActionsContainer = parser
    for name, field in ServerSettings.model_fields.items():
        if name in SECTIONS:
            group = parser.add_argument_group(SECTIONS[name])
        group.add_argument(get_flag(name), **_form(name, field), help=_help(name, field))


def get_flag(name: str) -> str:
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


PROG = "rbln-serve"
_ABOUT = {
    "serve": "Serve MODEL over HTTP: a directory, a model downloaded by `fetch`, or "
    "one on the Hugging Face hub.",
    "check": "Report whether and how MODEL can be served, without reading its weights.",
    "batch": "Write the answers to the requests in FILE to OUT, without a service.",
    "compile": "Fill the compile cache for MODEL ahead of time; only an NPU needs its weights.",
}
_EPILOG = """\
Every flag of `vllm serve` for the engine, chat templates, tools and LoRA is accepted as well, with
the same meaning; --help=all lists them, --help=max-num-seqs explains one.
"""
# Settings that vLLM has under the same name, which its --config file may contain.
_SHARED_WITH_VLLM = """
    host port root_path api_key headless ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs
    ssl_ciphers enable_ssl_refresh allowed_origins allowed_methods allowed_headers allow_credentials
""".split()


_BY_THEIR_NAME = {
    f"--{theirs}".replace("_", "-"): f"--{own}".replace("_", "-")
    for theirs, own in RENAMED_FLAGS.items()
}


def server_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of our flags of `command`."""
    parser = argparse.ArgumentParser(
        prog=f"{PROG} {command}",
        usage=f"{PROG} {command} MODEL [options] [vLLM options]",
        description=_ABOUT[command],
        epilog=_EPILOG,
        # A prefix of one of our flags may be a flag of vLLM.
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    about = "show this help, all flags of vLLM (--help=all) or one of them"
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="FLAG", help=about)
    add_setting_flags(parser)
    return parser


def split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[dict[str, object], list[str]]:
    """Return our flags by name, and the arguments for vLLM, MODEL first.

    Exits with help for --help, and with code 2 for a flag that neither parser knows.
    """
    namespace, rest = parser.parse_known_args([_dashed(word) for word in argv])
    flags = vars(namespace)
    topic = flags.pop("help", None)
    if topic == "":
        parser.print_help()
    elif topic is not None:
        from server.vllm.flags import print_help

        print_help(topic)
    if topic is not None:
        parser.exit()
    try:
        require_known(rest, vllm_flags(), parser._option_string_actions)
    except UnknownFlagError as error:
        parser.error(str(error))
    return flags, rest


def get_settings(
    parser: argparse.ArgumentParser, flags: dict[str, object], rest: Sequence[str]
) -> ServerSettings:
    """Return the settings and configure the log; exit with 2 for an invalid command line."""
    try:
        settings = load_settings(flags, config_file(rest))
    except (SettingsError, OSError) as error:
        parser.error(str(error))
    if not rest:
        parser.error("MODEL is missing: name a directory or a model on the Hugging Face hub")
    configure(settings.log_level, settings.log_format)
    return settings


def model_flags(argv: Sequence[str]) -> tuple[list[str], ServerSettings]:
    """Return vLLM's arguments and our settings for MODEL and flags of `serve`."""
    parser = server_parser("check")
    flags, rest = split(parser, argv)
    return rest, get_settings(parser, flags, rest)


def config_file(argv: Sequence[str]) -> dict[str, object]:
    """Return our settings in vLLM's --config file."""
    probe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    probe.add_argument("--config")
    path = probe.parse_known_args(argv)[0].config
    if path is None:
        return {}
    import yaml

    content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    named = {str(key).replace("-", "_"): value for key, value in content.items()}
    shared = {name: named[name] for name in _SHARED_WITH_VLLM if name in named}
    return shared | {
        setting: named[name] for name, setting in RENAMED_FLAGS.items() if name in named
    }


def _dashed(word: str) -> str:
    """Return one of our flags with dashes and by our name; vLLM also accepts `--api_key`."""
    flag, equals, value = word.partition("=")
    spelt = _BY_THEIR_NAME.get(flag.replace("_", "-"), flag.replace("_", "-"))
    name = spelt.removeprefix("--no-").removeprefix("--").replace("-", "_")
    known = flag.startswith("--") and name in ServerSettings.model_fields
    return f"{spelt}{equals}{value}" if known else word


class CommandParser(argparse.ArgumentParser):
    """Parser that names the nearest flag for an unknown one; flags must be written in full."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of `argparse.ArgumentParser`."""
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def reject(self, rest: Sequence[str]) -> None:
        """Exit with code 2 if arguments are left over."""
        if rest:
            word = next((word for word in rest if word.startswith("-")), rest[0])
            name = word.partition("=")[0]
            self.error(f"unknown argument {name}{nearest(name, sorted(set(_flags(self))))}")

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments; exit with code 2 for an unknown one."""
        args, rest = self.parse_known_args(argv)
        self.reject(rest)
        return args


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _flags(child)
