"""The HTTP edge of rbln-serve; importing it loads nothing heavy."""

from __future__ import annotations

__version__ = "0.3.0"
