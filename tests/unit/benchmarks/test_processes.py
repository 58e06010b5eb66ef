"""CPU time of a server's processes is read to less than a tick of the kernel's."""

from __future__ import annotations

import os
import time

from benchmarks.engines.processes import cpu_seconds


def test_the_time_of_a_process_is_that_of_its_own_clock() -> None:
    before = time.process_time()
    measured = cpu_seconds(os.getpid()).http
    assert before <= measured <= time.process_time()
