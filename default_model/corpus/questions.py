"""Blocks of questions with one answer, read from the text files beside this one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from default_model.corpus.dialogue import Dialogue, Generator, ask

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Block:
    """Ways to ask the same, and the answer."""

    questions: tuple[str, ...]
    answer: str


@cache
def blocks(name: str) -> tuple[Block, ...]:
    """Read `name`.txt; raises ValueError where a line is neither question, answer nor comment."""
    found: list[Block] = []
    questions: list[str] = []
    for line in (_HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        mark, text = line[:2], line[2:]
        if mark == "? ":
            questions.append(text)
        elif mark == "= ":
            found.append(Block(tuple(questions), text))
            questions = []
        elif line and mark != "# ":
            raise ValueError(f"{name}.txt: {line!r} begins with none of '? ', '= ' and '# '.")
    return tuple(found)


def topic(name: str) -> Generator:
    """Return a generator of questions of `name`.txt."""

    def draw(rng: Random) -> Dialogue:
        block = rng.choice(blocks(name))
        return ask(rng.choice(block.questions), block.answer)

    return draw
