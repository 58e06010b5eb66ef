"""The fenced blocks of README and docs/: their language, their text and whether they run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.architecture.source_tree import ROOT

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_MARKER = "no-run: "
_SEPARATORS = {"|", "||", "&&", ";", "&"}


@dataclass(frozen=True)
class Fence:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    no_run: str | None
    """The reason why it does not run; None if it runs."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences(*languages: str) -> tuple[Fence, ...]:
    """Return the blocks of these languages. Raises `ValueError` for an unknown marker."""
    pages = ["README.md", "examples/README.md"]
    pages += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
    return tuple(fence for page in pages for fence in _of_page(page) if fence.language in languages)


def _of_page(page: str) -> Iterator[Fence]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        indent, info, body = found.groups()
        line = text.count("\n", 0, found.start()) + 1
        language, _, rest = info.partition(" ")
        if rest and not (rest.startswith(_MARKER) and rest.removeprefix(_MARKER).strip()):
            raise ValueError(f"{page}:{line}: a fence says `no-run: REASON` or nothing: {info!r}")
        lines = (row.removeprefix(indent) for row in body.splitlines(keepends=True))
        reason = rest.removeprefix(_MARKER) if rest else None
        yield Fence(page, line, language, "".join(lines), reason)


def commands(fence: Fence) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell block, without assignments."""
    for line in fence.text.replace("\\\n", " ").split("\n"):
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # A quotation over several lines: the data of a curl.
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if word in _SEPARATORS:
                if command:
                    yield command
                command = []
            elif command or not re.match(r"^[A-Z_]+=", word):
                command.append(word)
