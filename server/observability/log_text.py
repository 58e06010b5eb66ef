"""Escapes log text, parts of which clients may have written.

Invariants: only records begin at the start of a line; control characters, including terminal
escape codes, are written as `\\xNN`; a record has a bounded length.
"""

from __future__ import annotations

import traceback
from types import TracebackType

MAX_CHARS = 4000
_MAX_LINES = 60
_MAX_REASON = 200
_MAX_FRAMES = 20
_INDENT = "\n    | "
_CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0))
"""C0 and C1 controls without tab and line feed; a line feed begins another line."""
_BIDI = (0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Unicode line separators and bidirectional controls."""
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS}
_ESCAPES |= {code: f"\\u{code:04x}" for code in _BIDI}

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def shown(text: str) -> str:
    """Return `text` bounded and escaped, with lines after the first indented behind a bar."""
    lines = clipped(text, MAX_CHARS).translate(_ESCAPES).split("\n")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"... {len(lines) - _MAX_LINES} more lines"]
    return _INDENT.join(lines)


def clipped(text: str, most: int) -> str:
    """Return a text cut to `most` characters, with the number of characters left out."""
    left_out = len(text) - most
    return text if left_out <= 0 else f"{text[:most]}... ({left_out} more characters)"


def exception_text(info: ExcInfo) -> str:
    """Return the traceback of an exception and of its causes, with truncated messages.

    An exception's message may quote a client's request.
    """
    parts: list[str] = []
    error: BaseException | None = info[1]
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
        places = "".join(traceback.format_list(frames))
        reason = repr(clipped(str(error), _MAX_REASON)) if str(error) else ""
        parts.append(f"{places}{type(error).__name__}: {reason}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts.reverse()
    return "Traceback (most recent call last):\n" + "\nwhich led to:\n".join(parts)
