"""Requests that are admitted before all others that wait, whatever the policy."""

from __future__ import annotations

from collections.abc import Iterable

from rbln_backend.config import FOREMOST_PRIORITY
from rbln_backend.vllm_compat.surface import Request, RequestStatus

_CAN_BEGIN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def behind_the_foremost(waiting: Iterable[Request]) -> list[Request]:
    """Those of ``waiting`` that must not be seen by a step that admits; none where none is first.

    One whose grammar is still being compiled holds nobody up.
    """
    requests = list(waiting)
    if not any(_is_foremost(request) and request.status in _CAN_BEGIN for request in requests):
        return []
    return [request for request in requests if not _is_foremost(request)]


def _is_foremost(request: Request) -> bool:
    return request.priority <= FOREMOST_PRIORITY
