"""The front end of a server without an API: it names no model and refuses every request."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request

from server.admission import Capacity
from server.errors import HeadlessError
from server.frontend import ParsedRequest, WireSchemas
from server.host.job_pool import JobCounts
from server.storage.responses.storage_options import StorageOptions
from server.tools.support import ToolSupport
from server.wire.endpoint import Endpoint, JsonObject


class HeadlessFrontend:
    """Implements `server.frontend.Frontend`; `front` is the address of the server with the API."""

    keep_alive_s = 0.0
    tracing = None
    adapters = None
    grammars = None
    profiler = None
    endpoints: frozenset[Endpoint] = frozenset()
    capacity = Capacity(max_num_seqs=1, max_queued_tokens=None)
    tools = ToolSupport("none", None, "a headless server has no API")

    def __init__(self, front: str) -> None:
        self._front = front
        self._reading = JobCounts()

    def schemas(self) -> WireSchemas:
        """Return no schema."""
        return WireSchemas(requests={}, answers={}, definitions={}, streaming=())

    async def read(
        self,
        endpoint: Endpoint,  # noqa: ARG002
        raw: bytes,  # noqa: ARG002
        before: bytes | None = None,  # noqa: ARG002
    ) -> ParsedRequest | StorageOptions:
        """Raise `HeadlessError`."""
        raise self._refusal()

    def take_reading(self) -> JobCounts:
        """Return no counts."""
        return self._reading

    async def handle(
        self,
        endpoint: Endpoint,  # noqa: ARG002
        parsed: ParsedRequest,  # noqa: ARG002
        stamp: JsonObject,  # noqa: ARG002
        request: Request,  # noqa: ARG002
    ) -> bytes | AsyncGenerator[str, None]:
        """Raise `HeadlessError`."""
        raise self._refusal()

    async def reset_prefix_cache(
        self,
        *,
        preempt: bool,  # noqa: ARG002
        tiers: bool,  # noqa: ARG002
    ) -> bool:
        """Raise `HeadlessError`: the server with the API resets all engines."""
        raise self._refusal()

    async def tokenizer_info(self) -> JsonObject | None:
        """Raise `HeadlessError`."""
        raise self._refusal()

    async def models(self) -> list[JsonObject]:
        """Return no model."""
        return []

    def _refusal(self) -> HeadlessError:
        return HeadlessError(
            "This server has no API: --headless runs engines for the server whose "
            f"--data-parallel-address is {self._front}. Send requests to that server."
        )
