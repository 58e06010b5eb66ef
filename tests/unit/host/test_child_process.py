"""How a job's process ends, and in which words that is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rbln_backend.host.processes import ChildError, ChildJob


def _run(how: str, timeout: float = 60.0) -> str:
    child = ChildJob(
        label="cpu side",
        module="tests.unit.host.ending_child",
        variables=os.environ,
        timeout=timeout,
    )
    return child.run(lambda path: path.write_text(how) and None, Path.read_text)


def test_an_answer_comes_back() -> None:
    assert _run("answer word") == "word"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit 3", "the cpu side ended with status 3:\nthe log"),
        (f"signal {signal.SIGILL}", "the cpu side was ended by SIGILL:\nthe log"),
        (f"signal {signal.SIGRTMIN + 6}", f"was ended by signal {signal.SIGRTMIN + 6}:"),
        # All is well but for the answer.
        ("exit 0", "the cpu side ended with status 0:\nthe log"),
    ],
)
def test_an_end_is_named(how: str, words: str) -> None:
    with pytest.raises(ChildError) as raised:
        _run(how)
    assert words in str(raised.value)


def test_a_job_that_takes_too_long_is_no_victim_of_a_signal() -> None:
    with pytest.raises(ChildError, match="the cpu side took over 1 s"):
        _run("wait", timeout=1.0)
