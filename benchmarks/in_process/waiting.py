"""Time of a decode step outside its graph while requests wait.

``python -m benchmarks.in_process.waiting --model 15m --waiting 10000`` prints the median
microseconds of a step with a full batch, and the busy cores of other processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from itertools import islice
from pathlib import Path

from benchmarks.in_process.step_profile import DecodeLoad, StepClock, start_engine
from benchmarks.in_process.step_report import OUTSIDE
from benchmarks.models.shapes import find_checkpoint
from benchmarks.runner.machine import busy_cpu_seconds

_STEPS, _PROMPT_TOKENS = 200, 32


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--waiting", type=int, required=True)
    args = parser.parse_args()
    # Logs of the engine must not mix with the two numbers.
    answers = os.dup(1)
    os.dup2(2, 1)
    checkpoint = find_checkpoint(args.model)
    with tempfile.TemporaryDirectory(prefix="rbln-waiting-") as folder:
        core = start_engine(checkpoint, 1, Path(folder))
        seats = core.vllm_config.scheduler_config.max_num_seqs
        load = DecodeLoad(core, checkpoint, seats, _PROMPT_TOKENS, 0.0)
        spent = []
        with StepClock(core) as clock:
            steps = load.decode_steps(2 * _STEPS)
            next(steps)
            for _ in range(args.waiting):
                load.add()
            wall, own, busy = time.perf_counter(), time.process_time(), busy_cpu_seconds()
            # The end of `steps` would run every waiting request.
            for _ in islice(steps, _STEPS):
                parts = clock.step()
                spent.append(sum(us for part, us in parts.items() if part not in OUTSIDE))
            own, busy = time.process_time() - own, busy_cpu_seconds() - busy
            wall = time.perf_counter() - wall
        core.shutdown()
    answer = f"{sorted(spent)[len(spent) // 2]} {max(0.0, busy - own) / wall}\n"
    os.write(answers, answer.encode())


if __name__ == "__main__":
    main()
