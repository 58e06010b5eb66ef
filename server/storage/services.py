"""Services of a server with --data-dir: files, batches and stored responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from server.admission import Admission
from server.errors import NotEnabledError
from server.host.tasks import background_task
from server.lifecycle import Lifecycle
from server.settings import ServerSettings
from server.storage.batches import BatchService, DecodeTimes
from server.storage.database import Store
from server.storage.jobs import JobLoop
from server.storage.responses import ResponseService

_REFRESH_S = 5.0


class StorageServices:
    """Store with its services; `batches` and `responses` are None without --data-dir."""

    def __init__(
        self,
        settings: ServerSettings,
        lifecycle: Lifecycle,
        admission: Admission,
        decode_times: Callable[[], DecodeTimes],
    ) -> None:
        """Open the store. Raises `SettingsError` if `--data-dir` cannot be used."""
        self.batches: BatchService | None = None
        self.responses: ResponseService | None = None
        self._store: Store | None = None
        if settings.data_dir:
            self._store = Store(settings)
            self.batches = BatchService(self._store, settings, lifecycle, admission, decode_times)
            self.responses = ResponseService(self._store, settings, lifecycle, admission)

    @property
    def owner_salt(self) -> bytes:
        """Salt of stored owners, empty without a store."""
        return b"" if self._store is None else self._store.database.owner_salt

    def require_batches(self) -> BatchService:
        """Return the service of files and batches. Raises `NotEnabledError`."""
        if self.batches is None:
            raise _off("Files and batches")
        return self.batches

    def require_responses(self) -> ResponseService:
        """Return the service of stored responses. Raises `NotEnabledError`."""
        if self.responses is None:
            raise _off("Stored responses")
        return self.responses

    @asynccontextmanager
    async def working(self, app: ASGIApp) -> AsyncIterator[None]:
        """Run the background work of the services for the length of the block, then close."""
        batches, responses = self.batches, self.responses
        if self._store is None or batches is None or responses is None:
            yield
            return

        async def refresh() -> float:
            await responses.refresh()
            await batches.refresh()
            return _REFRESH_S

        try:
            async with (
                batches.working(app),
                responses.working(app),
                background_task(JobLoop("stored objects", refresh).run()),
            ):
                yield
        finally:
            self._store.close()


def _off(services: str) -> NotEnabledError:
    return NotEnabledError(
        f"{services} are off: this server was started without --data-dir, the directory that they "
        "are stored in."
    )
