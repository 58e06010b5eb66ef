"""A connection's way out: its answers are not lost, and no peer keeps it open for ever.

Closing a socket while the peer still sends makes the kernel send a reset, which takes an answer
along that the peer has not read yet. So a connection whose peer has not finished lingers: its side
is ended, and what still comes is dropped for a while. Invariants: a connection that is leaving is
gone after `linger_s`, or after `linger_bytes` more have come; one whose peer takes nothing of
what it is to get is gone after `write_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from server.http.connections import Place
from server.settings import ServerSettings


class PatientTransport(asyncio.Transport):
    """What uvicorn's protocols get for a transport: theirs, with another way of closing."""

    def __init__(
        self,
        transport: asyncio.Transport,
        settings: ServerSettings,
        place: Place,
        peer_sends: Callable[[], bool],
    ) -> None:
        """`peer_sends` tells, when the connection is closed, whether more of a request comes."""
        super().__init__()
        # The one method that is called for every frame of a stream, without a detour.
        self.write = transport.write  # type: ignore[method-assign]
        self.place = place
        # Whether everything that still comes is to be dropped.
        self.leaving = False
        self._transport = transport
        self._settings = settings
        self._peer_sends = peer_sends
        self._loop = asyncio.get_running_loop()
        self._dropped = 0
        self._unsent = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the transport knows of the connection."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Take nothing from the peer."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Take what the peer sends again."""
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        """Whether no more requests are taken."""
        return self.leaving or self._transport.is_closing()

    def close(self) -> None:
        """End the connection once everything is sent, and the peer is done or had its time."""
        if self.is_closing():
            return
        if self._peer_sends():
            self.linger()
        else:
            self.leaving = True
            self._flush()

    def linger(self) -> None:
        """End our side of the connection and drop, within bounds, what still comes."""
        if self.is_closing():
            return
        self.leaving = True
        # TLS cannot end one side alone.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._transport.resume_reading()
        self._linger_timer = self._loop.call_later(self._settings.linger_s, self.abort)

    def drop(self, size: int) -> None:
        """Take note of so many bytes that came while leaving."""
        self._dropped += size
        if self._dropped > self._settings.linger_bytes:
            self.abort()

    def cut(self, reason: str) -> None:
        """End the connection at once, and count why."""
        if not self._transport.is_closing():
            self.place.count(reason)
        self.abort()

    def abort(self) -> None:
        """End the connection at once; what was not sent is lost."""
        self.leaving = True
        self._transport.abort()

    def watch_writing(self) -> None:
        """From now on the peer has to take something every `write_timeout_s`."""
        if self._write_timer is None:
            self._look_again()

    def stop_watching(self) -> None:
        """The peer has taken what there was."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def lost(self) -> None:
        """The connection is gone: no timer is left behind."""
        self.stop_watching()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self.place.leave()

    def _flush(self) -> None:
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self.watch_writing()

    def _look_again(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._write_timer = self._loop.call_later(self._settings.write_timeout_s, self._look)

    def _look(self) -> None:
        self._write_timer = None
        # While a peer is waited for nothing is added, so that less is left if it takes anything.
        if self._transport.get_write_buffer_size() < self._unsent:
            self._look_again()
        else:
            self.place.count("write_timeout")
            self.abort()
