"""Argument parser of the commands that take no flags of vLLM."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from server.commands.command_line.flag_names import nearest


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
