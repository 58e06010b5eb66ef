"""The report on speculation: gains of pairs of turns, and whether texts were the same."""

from __future__ import annotations

from benchmarks.over_http.speculation import Run, Turn, markdown
from benchmarks.over_http.speculation_tasks import TASKS
from benchmarks.runner.machine import describe_machine


def turn(side: str, round_number: int, decode_s: float, *, same: bool = True) -> Turn:
    return Turn(
        task="edit",
        batch=1,
        round=round_number,
        side=side,
        seconds=decode_s + 1,
        decode_s=decode_s,
        tokens=100,
        same=same,
    )


def report(*turns: Turn) -> str:
    run = Run(
        started="2026-11-23T06:00:00+00:00",
        command="python -m benchmarks.speculation",
        machine=describe_machine(),
        load_before=0.5,
        model="smollm2",
        config={"method": "ngram"},
        turns=list(turns),
    )
    return markdown(run).splitlines()[-1]


def test_gains_are_those_of_pairs() -> None:
    pairs = (turn("off", 0, 3.0), turn("on", 0, 1.0), turn("off", 1, 4.0), turn("on", 1, 4.0))
    row = report(*pairs)
    assert row == "| edit | 1 | 100 | 35.00 | 25.00 | 2.00 [1.00, 3.00] | 1.50 | yes |"


def test_another_text_is_reported() -> None:
    assert report(turn("off", 0, 3.0, same=False), turn("on", 0, 1.0, same=False)).endswith(
        "| **no** |"
    )


def test_no_two_requests_of_a_task_are_the_same() -> None:
    for task in TASKS.values():
        assert task(1) == task(1)
        assert task(1) != task(2)


def test_the_edited_file_is_the_prediction_but_for_a_name() -> None:
    body_fields = TASKS["edit, prediction"](3)
    question, begun = (message["content"] for message in body_fields["messages"])
    predicted = body_fields["prediction"]["content"]
    assert predicted in question
    assert question.count("\n") >= 150
    assert "cursor_3" in predicted
    assert "position_3" in begun
