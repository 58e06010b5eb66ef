"""`rbln-serve parity`: the command `rbln-parity` under the name of this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def parity(argv: Sequence[str]) -> int:
    """Replace this process by `rbln-parity`; does not return."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "rbln_backend.parity.command", *argv]
    os.execv(sys.executable, command)
