"""Reads adapters into memory in a background thread while graphs run."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

from rbln_backend.errors import AdapterError
from rbln_backend.lora.adapter_reader import AdapterReader, PackedAdapter
from rbln_backend.vllm_compat.lora import LoRARequest

State = Literal["reading", "ready", "failed"]

# Below the engine and its kernels, for machines with few cores.
_NICENESS = 10


class Staging:
    """Reads one adapter after the other. Its methods are called from one thread, the engine's."""

    def __init__(self, reader: AdapterReader) -> None:
        self._reader = reader
        self._futures: dict[int, Future[PackedAdapter]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, request: LoRARequest) -> None:
        """Start reading; discards an adapter that was staged under the same id."""
        if self._pool is None:
            # Not before: the capture of graphs forks this process.
            self._pool = ThreadPoolExecutor(1, "lora-reader", initializer=_lower_priority)
        self.drop(request.lora_int_id)
        self._futures[request.lora_int_id] = self._pool.submit(self._reader.read, request)

    def state(self, lora_int_id: int) -> tuple[State, str]:
        """Return the state and the reason of a failure; ``AdapterError`` for an unknown id."""
        future = self._futures.get(lora_int_id)
        if future is None:
            raise AdapterError(f"no adapter with id {lora_int_id} is staged")
        if not future.done():
            return "reading", ""
        error = future.exception()
        return ("failed", str(error)) if error is not None else ("ready", "")

    def take(self, request: LoRARequest) -> PackedAdapter:
        """Return the adapter, read now unless it was staged; raises ``AdapterError``."""
        future = self._futures.pop(request.lora_int_id, None)
        return self._reader.read(request) if future is None else future.result()

    def drop(self, lora_int_id: int) -> bool:
        """Discard a staged adapter; return whether there was one."""
        future = self._futures.pop(lora_int_id, None)
        if future is not None:
            future.cancel()
        return future is not None

    def close(self) -> None:
        """Stop; a read in progress ends without effect."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    with suppress(OSError):
        # Linux keeps a niceness per thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
