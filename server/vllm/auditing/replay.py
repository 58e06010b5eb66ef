"""Replay of audited answers: the same token ids again, or the first position that differs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest

from server.errors import ServerError
from server.vllm.auditing.answers import digest_or_none
from server.vllm.auditing.recompute import Recomputation, TokenDifference

if TYPE_CHECKING:
    from server.lora.registry import AdapterRegistry
    from server.vllm.engine_client import EngineClient


class ReplayError(Exception):
    """An answer that cannot be replayed, and why."""


class Replay:
    """Runs recorded answers on an engine."""

    def __init__(self, engine: EngineClient, adapters: AdapterRegistry | None) -> None:
        """`adapters` is the engine's registry, None without LoRA."""
        self._again, self._adapters = Recomputation(engine, "replay"), adapters
        # By the digest of their weights: a name may stand for other weights later.
        self._loaded: dict[str, LoRARequest] = {}
        # Answers run together, and the first loads the adapter of all.
        self._loading = asyncio.Lock()

    async def run(self, record: Mapping[str, Any]) -> TokenDifference | None:
        """Return the first difference from a record, None if all tokens are the same.

        Raises `ReplayError` for a record without tokens and for an absent adapter.
        """
        if record.get("other_inputs"):
            raise ReplayError("its prompt has inputs besides tokens")
        if not isinstance(record["output"], list):
            raise ReplayError("it has digests only (--audit-content digest)")
        adapter = await self._adapter(record["adapter"])
        return await self._again.difference(
            record["prompt"], record["params"], record["output"], adapter
        )

    async def _adapter(self, recorded: Mapping[str, Any] | None) -> LoRARequest | None:
        """Return the adapter of a record, which is loaded at its first use."""
        if recorded is None:
            return None
        name, path, digest = recorded["name"], recorded["path"], recorded["digest"]
        if self._adapters is None:
            raise ReplayError(f"its adapter {name!r} needs --enable-lora")
        async with self._loading:
            if digest not in self._loaded:
                self._loaded[digest] = await self._load(self._adapters, name, path, digest)
        return self._loaded[digest]

    async def _load(
        self, adapters: AdapterRegistry, name: str, path: str, digest: str
    ) -> LoRARequest:
        ready = (a for a in adapters.ready() if digest_or_none(a.path) == digest)
        if (found := next(ready, None)) is None:
            here = digest_or_none(path)
            if here != digest:
                what = "has no weights here" if here is None else f"has other weights here: {here}"
                raise ReplayError(f"its adapter {name!r} at {path} {what}; recorded: {digest}")
            alias = f"replay-{digest[:16]}"
            try:
                await adapters.load_static(alias, path, next(iter(adapters.limits.reserved_names)))
            except ServerError as error:
                raise ReplayError(f"its adapter {name!r}: {error.message}") from error
            found = adapters.get(alias)
        return LoRARequest(found.name, found.id, found.path)
