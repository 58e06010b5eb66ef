"""A Python with the clients that people use, and nothing of ours."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = Path(__file__).parent / "packages.txt"
CACHE = Path.home() / ".cache" / "rbln-serve" / "clients"


def clients_python() -> Path:
    """The interpreter, its environment made at the first use; needs the package registry then."""
    place = CACHE / hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:12]
    if not place.exists():
        building = place.with_name(f"{place.name}.{os.getpid()}")
        shutil.rmtree(building, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", building], check=True)
        command = [sys.executable, "-m", "pip", "--python", building / "bin" / "python", "install"]
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "-r", PACKAGES]
        subprocess.run([*command, *options], check=True)
        building.rename(place)
    return place / "bin" / "python"
