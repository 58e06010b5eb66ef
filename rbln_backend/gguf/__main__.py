"""`python -m rbln_backend.gguf JOB RESULT`: the job of `rbln_backend.checkpoints.conversion`.

It runs as a separate process, so that its imports and memory are released afterwards.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.checkpoint import write_checkpoint
from rbln_backend.host.child_process import report


def main() -> None:
    """Convert the file that the job names; the result says what was done, or why not."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    progress = partial(report, "tensors")
    try:
        result = {"done": write_checkpoint(Path(job["file"]), Path(job["folder"]), progress)}
    except CheckpointError as error:
        result = {"refused": str(error)}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
