"""Admission of priority requests before all other waiting requests, under any policy."""

from __future__ import annotations

from collections.abc import Iterable

from rbln_backend.config import FIRST_PRIORITY
from rbln_backend.vllm_compat.surface import Request, RequestStatus

_CAN_BEGIN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def behind_priority(waiting: Iterable[Request]) -> list[Request]:
    """Return the requests of ``waiting`` that a step must not admit before priority requests.

    Empty where no priority request can begin. A priority request whose grammar is still being
    compiled delays no other request.
    """
    requests = list(waiting)
    if not any(is_priority(request) and request.status in _CAN_BEGIN for request in requests):
        return []
    return [request for request in requests if not is_priority(request)]


def is_priority(request: Request) -> bool:
    """Return whether ``request`` is admitted before all others."""
    return request.priority <= FIRST_PRIORITY
