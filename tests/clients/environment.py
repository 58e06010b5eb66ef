"""A Python with the clients that people use, and nothing of ours."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.foreign_python import install, kept_python

PACKAGES = Path(__file__).parent / "packages.txt"
CACHE = Path.home() / ".cache" / "rbln-serve" / "clients"


def clients_python() -> Path:
    """The interpreter, its environment made at the first use; needs the package registry then."""
    key = hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:12]
    return kept_python(CACHE / key, lambda place: install(place, "-r", str(PACKAGES)))
