"""Frames of a stream that are sent as the engine's output arrives, past the stream's generators.

Nearly all frames of a stream differ in one text alone. The layers between the engine's output and
the connection make the first one. The others need none of these layers, and no wake-up of the
stream's task.
"""

from __future__ import annotations

from typing import Protocol

from pydantic_core import to_json

_FRAME_END = "\n\n"


class FrameWriter(Protocol):
    """Sends frames of one response at once."""

    @property
    def is_ready(self) -> bool:
        """True if a frame can be written now; False while the client reads too slowly."""
        ...

    def write(self, frame: bytes) -> None:
        """Send a frame; call it only while ``is_ready``."""
        ...


class DirectFrames:
    """The frames of one stream that differ in their text.

    ``note_text`` is called by the maker of a chunk, ``resume`` and ``pause`` by the response around
    each wait for a frame of its generator, ``push`` by the engine's output. Invariant: a frame is
    pushed only while the response waits and has sent all earlier frames, so that frames keep their
    order.
    """

    __slots__ = ("_claims", "_head", "_noted", "_tail", "_writer")

    def __init__(self) -> None:
        self._claims = 0
        self._noted: tuple[str, str] | None = None
        self._head: bytes | None = None
        self._tail = b""
        self._writer: FrameWriter | None = None

    def claim(self) -> bool:
        """Return whether the caller may push: the first may, until there is a second."""
        self._claims += 1
        return self._claims == 1

    def note_text(self, text: str, tail: str) -> None:
        """Remember the JSON of a chunk's text and what follows it in the chunk.

        Call it only for chunks that have nothing else of their own.
        """
        if self._head is None:
            self._noted = text, tail

    def resume(self, frame: str, writer: FrameWriter) -> None:
        """Allow pushes until ``pause``; ``frame`` is the one that was sent last."""
        if self._noted is not None:
            self._learn(frame, *self._noted)
            self._noted = None
        if self._head is not None and self._claims == 1:
            self._writer = writer

    def pause(self) -> None:
        """Allow no pushes until ``resume``."""
        self._writer = None

    @property
    def is_open(self) -> bool:
        """True if ``push`` can send a frame now."""
        return self._writer is not None and self._writer.is_ready

    def push(self, text: str) -> None:
        """Send the frame of a text; call it only while ``is_open``."""
        assert self._writer is not None
        assert self._head is not None
        self._writer.write(b"%b%b%b" % (self._head, to_json(text), self._tail))

    def _learn(self, frame: str, text: str, tail: str) -> None:
        """Take the beginning and the end of all frames from one whose text is known."""
        end = tail + _FRAME_END
        # A layer that adds to the end of its chunks, or makes other frames of them, is needed.
        if frame.endswith(text + end):
            self._head = frame[: -len(text + end)].encode()
            self._tail = end.encode()
