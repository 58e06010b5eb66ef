"""The log's line of a start's parts."""

from __future__ import annotations

from server.engine.launch import StartParts


def test_parts_follow_one_another() -> None:
    times = iter([10.0, 11.5, 12.0])
    parts = StartParts(lambda: next(times))
    parts.end("imports")
    parts.end("engine")
    line = parts.line({"engine": {"load": 0.25, "compile": 0.125}})
    assert line == "imports 1.50 s, engine 0.50 s (load 0.25, compile 0.12)"
