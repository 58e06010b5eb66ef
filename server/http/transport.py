"""A transport with a lingering close and a write timeout.

Closing a socket while the peer still sends makes the kernel send a reset, which can discard a
response that the peer has not read. So the connection lingers: it sends EOF and drops further
input. Invariants: a lingering connection is closed after `bounds.LINGER_S` seconds or
`LINGER_BYTES` bytes; a connection whose peer stops reading is closed after `WRITE_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from server import bounds
from server.http.connections import ConnectionSlot


class LingeringTransport(asyncio.Transport):
    """Wraps the transport of a uvicorn protocol and changes how it is closed."""

    def __init__(
        self,
        transport: asyncio.Transport,
        slot: ConnectionSlot,
        peer_sends: Callable[[], bool],
    ) -> None:
        """Wrap `transport`; `peer_sends` returns whether a request is not yet complete."""
        super().__init__()
        # Called for every frame of a stream, so it is not wrapped.
        self.write = transport.write  # type: ignore[method-assign]
        self.slot = slot
        # Whether further input is dropped.
        self.leaving = False
        self._transport = transport
        self._peer_sends = peer_sends
        self._loop = asyncio.get_running_loop()
        self._dropped = 0
        self._unsent = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the wrapped transport's information."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Stop reading from the peer."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue reading from the peer."""
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        """Return whether no further requests are accepted."""
        return self.leaving or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once everything is sent, lingering if the peer still sends."""
        if self.is_closing():
            return
        if self._peer_sends():
            self.linger()
        else:
            self.leaving = True
            self._flush()

    def linger(self) -> None:
        """Send EOF and drop further input until a limit is reached."""
        if self.is_closing():
            return
        self.leaving = True
        # TLS has no half-close.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._linger_timer = self._loop.call_later(bounds.LINGER_S, self.abort)

    def drop(self, size: int) -> None:
        """Count `size` dropped bytes; abort above `LINGER_BYTES`."""
        self._dropped += size
        if self._dropped > bounds.LINGER_BYTES:
            self.abort()

    def cut(self, reason: str) -> None:
        """Abort the connection and count the reason."""
        if not self._transport.is_closing():
            self.slot.count(reason)
        self.abort()

    def abort(self) -> None:
        """Close the connection immediately; unsent data is lost."""
        self.leaving = True
        self._transport.abort()

    def watch_writing(self) -> None:
        """Start the write timeout: the peer must read something every `WRITE_TIMEOUT_S`."""
        if self._write_timer is None:
            self._start_write_timer()

    def stop_watching(self) -> None:
        """Stop the write timeout."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def lost(self) -> None:
        """Cancel all timers and release the slot of a closed connection."""
        self.stop_watching()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self.slot.leave()

    def _flush(self) -> None:
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self.watch_writing()

    def _start_write_timer(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        timeout_s = bounds.WRITE_TIMEOUT_S
        self._write_timer = self._loop.call_later(timeout_s, self._on_write_timeout)

    def _on_write_timeout(self) -> None:
        self._write_timer = None
        # The application is paused, so the buffer shrinks if the peer reads anything.
        if self._transport.get_write_buffer_size() < self._unsent:
            self._start_write_timer()
        else:
            self.slot.count("write_timeout")
            self.abort()
