"""`rbln-serve completion SHELL`: completion scripts for bash, zsh and fish.

The scripts hold all names, so that completing starts no Python. Arguments that are no flags are
completed as file names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from server.commands.command_line.command_parser import CommandParser

_PROG = "rbln-serve"

Abouts = Mapping[str, str]
"""Descriptions by command."""
Flags = Mapping[str, Sequence[str]]
"""Flags by command."""


def completion(argv: Sequence[str], abouts: Abouts, flags: Flags) -> int:
    """Print the script of the shell that `argv` names; return 0 or 2."""
    parser = CommandParser(
        prog=f"{_PROG} completion",
        description="Print a completion script, such as for "
        "`source <(rbln-serve completion bash)`.",
    )
    parser.add_argument("shell", choices=_SCRIPTS, help="the shell")
    args = parser.parse_all(argv)
    sys.stdout.write(_SCRIPTS[args.shell](abouts, flags))
    return 0


def _bash(abouts: Abouts, flags: Flags) -> str:
    cases = "\n".join(
        f'        {name}) words="{" ".join(known)}" ;;' for name, known in flags.items()
    )
    return f"""\
_rbln_serve() {{
    local words="" current="${{COMP_WORDS[COMP_CWORD]}}"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "{" ".join(abouts)} --help --version" -- "$current")
        return
    fi
    [[ $current == -* ]] || return 0
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -o default -F _rbln_serve {_PROG}
"""


def _zsh(abouts: Abouts, flags: Flags) -> str:
    commands = "\n".join(f"        '{name}:{about}'" for name, about in _quoted(abouts))
    cases = "\n".join(
        f"        {name}) compadd -- {' '.join(known)} ;;" for name, known in flags.items()
    )
    return f"""\
#compdef {_PROG}
_rbln_serve() {{
    local -a commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    if [[ $PREFIX != -* ]]; then
        _files
        return
    fi
    case $words[2] in
{cases}
    esac
}}
compdef _rbln_serve {_PROG}
"""


def _fish(abouts: Abouts, flags: Flags) -> str:
    lines = [
        f"complete -c {_PROG} -n __fish_use_subcommand -f -a {name} -d '{about}'"
        for name, about in _quoted(abouts)
    ]
    for name, known in flags.items():
        start = f"complete -c {_PROG} -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{start} {_fish_option(flag)}" for flag in known]
    return "\n".join(lines) + "\n"


def _fish_option(flag: str) -> str:
    """Return fish's option for a long flag, a letter, or letters after one dash."""
    if flag.startswith("--"):
        return f"-l {flag[2:]}"
    return f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"


def _quoted(abouts: Abouts) -> list[tuple[str, str]]:
    """Return the descriptions as the text between single quotes."""
    return [(name, about.replace("'", "")) for name, about in abouts.items()]


_SCRIPTS: dict[str, Callable[[Abouts, Flags], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
