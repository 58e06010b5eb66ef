"""The scheduler's side of prompts whose KV comes from another server."""

from __future__ import annotations

from collections.abc import Iterable

from rbln_backend.kv_transfer.nixl_connector import PromptScheduling, RblnNixlConnector
from rbln_backend.vllm_compat.kv_connector import KVConnectorBase_V1
from rbln_backend.vllm_compat.surface import Request, RequestStatus


class RemotePrompts:
    """Names the waiting requests whose blocks are to be requested from the server that has them."""

    def __init__(self, side: PromptScheduling) -> None:
        self._side = side

    @classmethod
    def of(cls, connector: KVConnectorBase_V1) -> RemotePrompts:
        """Return those of a scheduler's ``connector``."""
        assert isinstance(connector, RblnNixlConnector)
        assert isinstance(connector.connector_scheduler, PromptScheduling)
        return cls(connector.connector_scheduler)

    def unrequested(self, waiting: Iterable[Request]) -> list[Request]:
        """Return those of ``waiting`` whose blocks are not requested yet, in their order."""
        return [request for request in waiting if self.is_unrequested(request)]

    def is_unrequested(self, request: Request) -> bool:
        """Return whether blocks of ``request`` have to be requested before it can begin."""
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            return False
        return self._side.will_read(request)
