"""Graphs captured in forked children: what they deliver, and what becomes of children that fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rbln_backend.core import GraphSpec
from rbln_backend.worker.graph_factory import capture_in_children

SPECS = [GraphSpec("decode", size) for size in (1, 2, 4, 8, 16)]


def by_its_name(spec: GraphSpec) -> bytes:
    return f"{spec} by {os.getpid()}".encode()


def name_in(data: bytes) -> str:
    return data.decode().partition(" by ")[0]


def children() -> set[str]:
    """Processes of ours: other tests of this process may have some, too."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return set(text.split())


def test_every_graph_is_delivered_once_by_other_processes() -> None:
    before = children()
    started: list[GraphSpec] = []
    captured = list(capture_in_children(SPECS, by_its_name, workers=3, on_start=started.append))
    assert sorted(c.spec for c in captured) == sorted(started) == SPECS
    assert all(name_in(c.data) == str(c.spec) and c.seconds > 0.0 for c in captured)
    assert str(os.getpid()) not in {c.data.decode().partition(" by ")[2] for c in captured}
    assert children() == before


@pytest.mark.parametrize("fate", ["killed", "failed"])
def test_graphs_of_a_lost_child_are_missing_and_the_others_arrive(fate: str) -> None:
    before = children()

    def capture(spec: GraphSpec) -> bytes:
        if spec == SPECS[1]:
            if fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("cannot be captured")
        # The other child gets all the time it needs to take the doomed graph.
        time.sleep(0.05)
        return by_its_name(spec)

    captured = list(capture_in_children(SPECS, capture, workers=2, on_start=lambda _: None))
    assert sorted(c.spec for c in captured) == [spec for spec in SPECS if spec != SPECS[1]]
    assert children() == before


def test_a_child_without_progress_is_killed_after_the_timeout() -> None:
    before = children()

    def capture(spec: GraphSpec) -> bytes:
        if spec == SPECS[-1]:
            signal.pause()
        return by_its_name(spec)

    captured = list(
        capture_in_children(SPECS, capture, workers=2, on_start=lambda _: None, timeout_s=0.5)
    )
    assert sorted(c.spec for c in captured) == SPECS[:-1]
    assert children() == before


def test_a_long_capture_ends_beside_a_child_without_progress() -> None:
    def capture(spec: GraphSpec) -> bytes:
        if spec == SPECS[0]:
            signal.pause()
        end = time.process_time() + 2.0
        while spec == SPECS[1] and time.process_time() < end:
            pass
        return by_its_name(spec)

    captured = list(
        capture_in_children(SPECS, capture, workers=2, on_start=lambda _: None, timeout_s=0.5)
    )
    assert sorted(c.spec for c in captured) == SPECS[1:]


def test_children_are_killed_when_the_consumer_stops_early() -> None:
    before = children()

    def capture(spec: GraphSpec) -> bytes:
        if spec == SPECS[0]:
            return by_its_name(spec)
        signal.pause()
        return b""

    captured = capture_in_children(SPECS, capture, workers=2, on_start=lambda _: None)
    assert next(captured).spec == SPECS[0]
    captured.close()
    assert children() == before
