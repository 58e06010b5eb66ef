"""Where the shipped checkpoint lies."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
CHAT_TEMPLATE = CHECKPOINT / "chat_template.jinja"
