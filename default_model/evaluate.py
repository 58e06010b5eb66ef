"""Asks the held-back questions: `python -m default_model.evaluate`.

Greedy, by `transformers` from a checkpoint folder, or with --url by a server that runs it (with
`--enable-auto-tool-choice --tool-call-parser hermes` for the kinds with tools). Prints a table;
--save writes what the model card quotes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from default_model.answering import LocalModel, Server
from default_model.corpus.dialogue import Dialogue
from default_model.corpus.mixture import KINDS, draw_kind
from default_model.paths import CHECKPOINT
from default_model.scoring import is_right

SEED = 7
PER_KIND = 50

Answer = Callable[[list[Dialogue]], list[str]]


def questions(kind: str, count: int) -> list[Dialogue]:
    """Return up to `count` different held-back questions of `kind`, the same ones every time."""
    rng = Random(f"{SEED}/{kind}")
    found: dict[str, Dialogue] = {}
    for _ in range(20 * count):
        dialogue = draw_kind(kind, rng, held_back=True)
        # What `tool_choice` forces cannot be asked for without it.
        forced = kind == "tool calls" and "tool_calls" not in dialogue.answer
        if not forced:
            found.setdefault(json.dumps([dialogue.messages[:-1], dialogue.tools]), dialogue)
        if len(found) == count:
            break
    return list(found.values())


def evaluate(
    answer: Answer, per_kind: int, say: Callable[[str], object], *, wrong: bool = False
) -> dict[str, Any]:
    """Return {"kinds": {kind: {"right", "asked"}}, "right", "asked"}."""
    kinds: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        asked = questions(kind, per_kind)
        answers = answer(asked)
        marks = [is_right(d, text) for d, text in zip(asked, answers, strict=True)]
        kinds[kind] = {"right": sum(marks), "asked": len(marks)}
        say(f"{kind:<20} {sum(marks):>4} of {len(marks):>3}\n")
        for dialogue, text, mark in zip(asked, answers, marks, strict=True):
            if wrong and not mark:
                told = dialogue.answer.get("tool_calls") or dialogue.answer["content"]
                say(f"    {dialogue.question!r}\n      {text!r}\n      not {told!r}\n")
    right, total = (sum(k[name] for k in kinds.values()) for name in ("right", "asked"))
    say(f"{'all':<20} {right:>4} of {total:>3}  {right / total:.0%}\n")
    return {"kinds": kinds, "right": right, "asked": total}


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m default_model.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--url", help="ask the server here, such as http://localhost:8000")
    parser.add_argument("--model", default="default-model", help="its name at the server")
    parser.add_argument("--per-kind", type=int, default=PER_KIND)
    parser.add_argument("--wrong", action="store_true", help="show the answers that are wrong")
    parser.add_argument("--save", type=Path, help="write the scores to this JSON file")
    options = parser.parse_args()
    model = Server(options.url, options.model) if options.url else LocalModel(options.checkpoint)
    scores = evaluate(model.answers, options.per_kind, sys.stdout.write, wrong=options.wrong)
    if options.save:
        text = json.dumps({"per_kind": options.per_kind, **scores}, indent=2) + "\n"
        options.save.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
