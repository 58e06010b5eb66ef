"""Check of flag names before anything heavy is imported.

vLLM's parser takes seconds to import. Its flag names are therefore kept in a text file, one flag a
line, which `python -m deploy.upstream.flag_names` writes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

SERVE_FLAGS = Path(__file__).with_name("vllm_serve_flags.txt")
"""File of the flags of `vllm serve`."""

_SHORT = re.compile(r"-[A-Za-z]")


class UnknownFlagError(ValueError):
    """A flag that no parser knows; the message suggests the nearest one."""


def vllm_flags() -> frozenset[str]:
    """Return the flags of `vllm serve`."""
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
