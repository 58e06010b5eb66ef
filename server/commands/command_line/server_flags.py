"""Command lines of the commands that take MODEL, our flags and vLLM's flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from server.commands.command_line.flag_names import UnknownFlagError, require_known, vllm_flags
from server.commands.command_line.setting_flags import add_setting_flags
from server.observability.logging import configure
from server.settings import ServerSettings, SettingsError, load_settings
from server.vllm.flag_table import RENAMED_FLAGS

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
_SHARED_WITH_VLLM = (
    *("host", "port", "root_path", "api_key", "headless"),
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    "enable_ssl_refresh",
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
)


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
    ours, rest = parser.parse_known_args([_dashed(word) for word in argv])
    flags = vars(ours)
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


def settings_of(
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
    return rest, settings_of(parser, flags, rest)


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
    ours = {name: named[name] for name in _SHARED_WITH_VLLM if name in named}
    return ours | {own: named[name] for name, own in RENAMED_FLAGS.items() if name in named}


def _dashed(word: str) -> str:
    """Return one of our flags with dashes and by our name; vLLM also accepts `--api_key`."""
    flag, equals, value = word.partition("=")
    spelt = _BY_THEIR_NAME.get(flag.replace("_", "-"), flag.replace("_", "-"))
    name = spelt.removeprefix("--no-").removeprefix("--").replace("-", "_")
    known = flag.startswith("--") and name in ServerSettings.model_fields
    return f"{spelt}{equals}{value}" if known else word
