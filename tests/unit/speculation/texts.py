"""Requests that tests pass to drafters."""

from __future__ import annotations

from collections.abc import Sequence

from rbln_backend.speculation.drafter import DraftedRequest, Drafter


def answered(drafter: Drafter, name: str, answer: Sequence[int], *, key: str | None = None) -> None:
    """Begin a request of one prompt token, answer it and finish it."""
    drafter.begin(DraftedRequest(name, (0,), key=key))
    drafter.extend(name, answer)
    drafter.end(name, finished=True)


def saved(drafter: Drafter, request: DraftedRequest, answer: Sequence[int], limit: int) -> int:
    """Decode `answer` with drafts; return how many of its tokens needed no step of their own."""
    drafter.begin(request)
    done = steps = 0
    while done < len(answer):
        draft = drafter.propose(request.request_id, limit)
        assert len(draft) <= limit
        taken = 1
        while taken <= len(draft) and answer[done : done + taken] == draft[:taken]:
            taken += 1
        taken = min(taken, len(answer) - done)
        drafter.extend(request.request_id, answer[done : done + taken])
        done += taken
        steps += 1
    drafter.end(request.request_id, finished=True)
    return len(answer) - steps
