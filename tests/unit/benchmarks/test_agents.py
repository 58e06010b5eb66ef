"""The report on agents' sessions: shares and times of the later turns, by API, head and side."""

from __future__ import annotations

from benchmarks.over_http.agent_sessions import Session, clock
from benchmarks.over_http.agents import Run, Turn, markdown
from benchmarks.runner.machine import describe_machine


def turn(number: int, cached: int, seconds: float) -> Turn:
    return Turn(
        side="ours",
        api="messages",
        head="stable",
        turn=number,
        prompt_tokens=1000 + number,
        cached_tokens=cached,
        first_s=seconds / 2,
        seconds=seconds,
    )


def test_later_turns_are_distinguished_from_the_first() -> None:
    run = Run(
        started="2026-11-23T06:00:00+00:00",
        command="python -m benchmarks.agents",
        machine=describe_machine(),
        load_before=0.5,
        model="15m",
        turns=[turn(1, 0, 8.0), turn(2, 501, 1.0), turn(3, 501, 2.0)],
    )
    row = markdown(run).splitlines()[-1]
    assert row == "| messages | stable | ours | 1003 | 50.0% | 8.00 | 1.50 | 0.75 | 11.0 |"


def test_a_session_grows_and_its_beginning_stays() -> None:
    session = Session(1)
    before = session.messages("m", 4), session.responses("m", 4)
    session.step()
    after = session.messages("m", 4), session.responses("m", 4)
    assert after[0]["system"] == before[0]["system"]
    assert after[0]["tools"] == before[0]["tools"]
    assert after[1]["input"][: len(before[1]["input"])] == before[1]["input"]
    assert len(after[0]["messages"]) == len(before[0]["messages"]) + 2


def test_a_head_changes_with_every_turn() -> None:
    session = Session(1, head=clock)
    first = session.messages("m", 4)["system"][0]
    session.step()
    assert session.messages("m", 4)["system"][0] != first
    assert session.responses("m", 4)["instructions"].startswith("Current time: ")
