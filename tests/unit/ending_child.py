"""A job that ends as it is told: ``exit 3``, ``signal 4``, ``wait``, or ``answer word``."""

import os
import signal
import sys
from pathlib import Path

how, *rest = Path(sys.argv[1]).read_text().split()
sys.stderr.write("the log\n")
sys.stderr.flush()
match how:
    case "exit":
        sys.exit(int(rest[0]))
    case "signal":
        os.kill(os.getpid(), int(rest[0]))
    case "wait":
        signal.pause()
    case "answer":
        Path(sys.argv[2]).write_text(rest[0])
