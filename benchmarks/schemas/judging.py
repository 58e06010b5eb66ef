"""Verdicts of a side on schemas and their test instances, in a process that may be killed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.schemas.sides import SIDES, RefusedSchemaError, end_token, tokenizer, warm_up

COMPILE_LIMIT_S = 30.0
"""Seconds for a schema and its instances; one that takes longer counts as refused."""


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema with instances; each of them is valid or not."""

    name: str
    schema: Any
    tests: Sequence[dict[str, Any]]


@dataclass(slots=True)
class Judgement:
    """Result of one side on one schema; processor times in seconds, `refused` is the reason."""

    name: str
    refused: str | None = None
    valid_refused: int = 0
    invalid_accepted: int = 0
    compile_s: float = 0.0
    masks: int = 0
    masks_s: float = 0.0
    worst_mask_s: float = 0.0

    def add_mask(self, seconds: float) -> None:
        """Count the mask of one token."""
        self.masks += 1
        self.masks_s += seconds
        self.worst_mask_s = max(self.worst_mask_s, seconds)

    @property
    def passes(self) -> bool:
        """True if the schema compiles and every instance is judged as it should be."""
        return self.refused is None and not self.valid_refused and not self.invalid_accepted


@dataclass(frozen=True, slots=True)
class SideResult:
    """Results of one side: counts of schemas, processor times in seconds, and what does not pass.

    A schema passes if it compiles and every instance is judged as it should be.
    """

    passing: int
    refused: int
    valid_refused: int
    invalid_accepted: int
    compile_p50_s: float
    compile_p99_s: float
    mean_mask_s: float
    worst_mask_s: float
    others: list[Judgement]

    @classmethod
    def of(cls, found: Sequence[Judgement]) -> SideResult:
        """Return the results of some judgements."""
        times = sorted(item.compile_s for item in found if item.refused is None)
        return cls(
            passing=sum(item.passes for item in found),
            refused=sum(item.refused is not None for item in found),
            valid_refused=sum(item.valid_refused > 0 for item in found),
            invalid_accepted=sum(item.invalid_accepted > 0 for item in found),
            compile_p50_s=_at(times, 0.5),
            compile_p99_s=_at(times, 0.99),
            mean_mask_s=sum(item.masks_s for item in found)
            / max(1, sum(item.masks for item in found)),
            worst_mask_s=max((item.worst_mask_s for item in found), default=0.0),
            others=[item for item in found if not item.passes],
        )


def _at(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the sorted `values` is; 0 for none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def cases_of(path: Path, most: int | None = None) -> list[SchemaCase]:
    """Read lines of JSON with `name`, `schema` and `tests` (`data`, `valid`), the first `most`."""
    lines = path.read_text(encoding="utf-8").splitlines()[:most]
    return [SchemaCase(**json.loads(line)) for line in lines]


def judge(side: str, case: SchemaCase) -> Judgement:
    """Compile a schema and walk its instances, with a mask for each token."""
    found = Judgement(case.name)
    compile_ = SIDES[side]
    begin = time.process_time()
    try:
        walk = compile_(case.schema)
    except RefusedSchemaError as error:
        found.refused = str(error)[:300]
        return found
    found.compile_s = time.process_time() - begin
    for number, test in enumerate(case.tests):
        first = walk if number == 0 else compile_(case.schema)
        accepted = _walked(first, _tokens(test["data"]), found.add_mask)
        if test["valid"] and not accepted:
            found.valid_refused += 1
        elif accepted and not test["valid"]:
            found.invalid_accepted += 1
    return found


def _tokens(value: Any) -> list[int]:
    text = json.dumps(value, ensure_ascii=False)
    return [*tokenizer()(text, add_special_tokens=False).input_ids, end_token()]


def _walked(walk: Any, tokens: list[int], add_mask: Callable[[float], None]) -> bool:
    for token in tokens:
        begin = time.process_time()
        walk.mask()
        add_mask(time.process_time() - begin)
        if not walk.allows(token):
            return False
        if token != tokens[-1]:
            walk.take(token)
    return True


def judgements(side: str, cases: Sequence[SchemaCase]) -> Iterator[Judgement]:
    """Yield a side's result on each schema; a process that hangs or dies refuses its schema."""
    worker = _Worker(side)
    try:
        for case in cases:
            yield worker.judge(case)
    finally:
        worker.end()


class _Worker:
    """The process of one side; started anew after a failure."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._side), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def judge(self, case: SchemaCase) -> Judgement:
        self._pipe.send(case)
        reason = f"it takes more than {COMPILE_LIMIT_S:g} s"
        if self._pipe.poll(COMPILE_LIMIT_S):
            try:
                answer: Judgement = self._pipe.recv()
            except EOFError:
                reason = "the process has died"
            else:
                return answer
        self.end()
        self._start()
        return Judgement(case.name, refused=reason, compile_s=COMPILE_LIMIT_S)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, side: str) -> None:
    warm_up(side)
    # As in the server's trial process, cycles are collected between schemas.
    gc.freeze()
    gc.disable()
    pipe.send("ready")
    while True:
        pipe.send(judge(side, pipe.recv()))
        gc.collect()
