"""Verdicts beside busy processes: the same as on a quiet machine, from real trial processes.

A process of its own imports this module, which therefore has neither torch nor vLLM.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from server.errors import InvalidGrammarError, InvalidSchemaError, NotTriedError
from server.host.job_pool import JobPool, limit_processor_time
from server.structured_outputs.constraint import Constraint, ConstraintKind
from server.structured_outputs.gate import GrammarGate
from server.structured_outputs.grammars import SchemaRules
from server.structured_outputs.trial import do_job

RULES = SchemaRules(compact=False, closed=True)
CPU_S = 2.0
ENDLESS = 'root ::= "a"'
LINES = (Path(__file__).parent / "schemas.jsonl").read_text().splitlines()
SCHEMAS = {line["name"]: json.dumps(line["schema"]) for line in map(json.loads, LINES)}


def burn() -> None:
    while True:
        pass


def try_grammar(kind: str, text: str) -> list[str]:
    """Stand in for the model's: compile a schema's grammar; one text never ends."""
    if text == ENDLESS:
        burn()
    import llguidance

    error = llguidance.LLMatcher.validate_grammar(text)
    if error:
        raise ValueError(error)
    return []


def serve(pipe: Connection) -> None:
    pipe.send_bytes(b"ready")
    while True:
        job = pipe.recv_bytes()
        limit_processor_time(CPU_S)
        verdict = do_job(job, try_grammar, RULES)
        limit_processor_time(0)
        pipe.send_bytes(verdict.to_bytes())


def start(pipe: Connection) -> BaseProcess:
    process = SpawnProcess(target=serve, args=(pipe,), daemon=True)
    process.start()
    return process


@contextmanager
def busy(count: int) -> Iterator[None]:
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def gate_with(wall_s: float) -> GrammarGate:
    return GrammarGate(64 << 10, JobPool("trials", start, 1, wall_s), 1024, CPU_S, rules=RULES)


async def reasons(gate: GrammarGate) -> dict[str, str | None]:
    found = {}
    for name, text in SCHEMAS.items():
        verdict, _ = await gate.verdict([Constraint(ConstraintKind.JSON, text, "json")])
        found[name] = verdict.reason
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_verdict_is_the_same_under_load() -> None:
    quiet = await reasons(gate_with(wall_s=120))
    with busy(2):
        loaded = await reasons(gate_with(wall_s=120))
    assert loaded == quiet
    assert 0 < sum(reason is not None for reason in quiet.values()) <= 10


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_takes_too_much_work_is_refused_for_a_while() -> None:
    gate = gate_with(wall_s=120)
    endless = Constraint(ConstraintKind.GRAMMAR, ENDLESS, "structured_outputs.grammar")
    for _ in range(2):
        with pytest.raises(InvalidGrammarError, match="more than 2 s of processor time"):
            await gate.check_job([endless])
    assert gate.take_counts().results == {"spent": 1, "refused": 1}
    # The next trial finds a process that works.
    with pytest.raises(InvalidSchemaError):
        await gate.check_job([Constraint(ConstraintKind.JSON, SCHEMAS["remote_reference"], "json")])


async def test_what_a_busy_machine_cannot_try_is_a_503_and_tried_again() -> None:
    gate = gate_with(wall_s=0.2)
    endless = Constraint(ConstraintKind.GRAMMAR, ENDLESS, "structured_outputs.grammar")
    for _ in range(2):
        with pytest.raises(NotTriedError) as caught:
            await gate.check_job([endless])
        assert caught.value.status == 503
        assert caught.value.headers["retry-after"] == "2"
    assert gate.take_counts().results == {"timeout": 2}
