"""Process of one side: reads a job, reports progress on standard output, writes the result."""

from __future__ import annotations

import sys
from pathlib import Path

from rbln_backend.host.processes import report
from rbln_backend.parity.jobs import Job
from rbln_backend.parity.layers import first_layers


def main() -> int:
    """Run ``python -m rbln_backend.parity JOB RESULT``; logs go to standard error."""
    job = Job.read(Path(sys.argv[1]))
    if job.side == "transformers":
        from rbln_backend.parity import transformers_side as side
    else:
        from rbln_backend.parity import vllm_side as side  # type: ignore[no-redef]
    with first_layers(job) as job:
        side.run(job, report).write(Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
