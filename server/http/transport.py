"""A transport with a lingering close and a write timeout.

Closing a socket while the peer still sends makes the kernel send a reset, which can discard a
response that the peer has not read. So the connection lingers: it sends EOF and drops further
input. Invariants: a lingering connection is closed after `bounds.LINGER_S` seconds or
`LINGER_BYTES`; in a body after `LINGER_S` without input, `BODY_LINGER_S` or `BODY_LINGER_BYTES`; a
connection whose peer stops reading is closed after `WRITE_TIMEOUT_S`.
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
        self._dropped = self._dropped_before = 0
        self._drop_until = 0.0
        self._drop_bytes = 0
        self._on_limit: Callable[[], None] = self.abort
        self._unsent = 0
        self._drop_timer: asyncio.TimerHandle | None = None
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
            self.linger(is_body=True)
        else:
            self.leaving = True
            self._flush()

    def linger(self, *, is_body: bool = False) -> None:
        """Send EOF and drop further input, such as a body, until a limit is reached."""
        if self.is_closing():
            return
        self.leaving = True
        # TLS has no half-close.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self.start_dropping(self.abort, is_body=is_body)

    def write_early(self, head: bytes) -> None:
        """Send the bytes with which the next write begins."""

        def write_rest(data: bytes) -> None:
            self.write = self._transport.write  # type: ignore[method-assign]
            self.write(data[len(head) :])

        self.write(head)
        self.write = write_rest  # type: ignore[method-assign, assignment]

    def start_dropping(self, on_limit: Callable[[], None], *, is_body: bool) -> None:
        """Begin to drop input; call `on_limit` once it is too slow or too much."""
        self.stop_dropping()
        self._on_limit = on_limit
        self._dropped = self._dropped_before = 0
        self._drop_bytes = bounds.BODY_LINGER_BYTES if is_body else bounds.LINGER_BYTES
        self._drop_until = self._loop.time() + (bounds.BODY_LINGER_S if is_body else 0.0)
        self._drop_timer = self._loop.call_later(bounds.LINGER_S, self._check_dropped)

    def drop(self, size: int) -> None:
        """Count `size` dropped bytes."""
        self._dropped += size
        if self._dropped > self._drop_bytes:
            self._on_limit()

    def stop_dropping(self) -> None:
        """End of the input that is dropped."""
        if self._drop_timer is not None:
            self._drop_timer.cancel()
            self._drop_timer = None

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
        self.stop_dropping()
        self.slot.leave()

    def _check_dropped(self) -> None:
        if self._dropped == self._dropped_before or self._loop.time() > self._drop_until:
            self._on_limit()
            return
        self._dropped_before = self._dropped
        self._drop_timer = self._loop.call_later(bounds.LINGER_S, self._check_dropped)

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
