"""The real server as a subprocess: the command line, the engine, a real socket."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import httpx

from tests.graph_cache import graph_cache
from tests.warm_process import ForkedProcess, warm_process

FLAGS = (
    *"--served-model-name tiny --dtype float32 --max-model-len 256".split(),
    *"--max-num-seqs 4 --block-size 16 --max-num-batched-tokens 64".split(),
)
READY_TIMEOUT_S = 240.0


class RealServer:
    """One server process; a context manager that leaves no process behind.

    It is forked from a process that has imported vLLM, see `tests.warm_process`, unless
    `own_imports`: what is measured, or shared between processes, then is as in production.
    """

    def __init__(
        self,
        checkpoint: Path,
        tmp_path: Path,
        *flags: str,
        output: Path | None = None,
        environment: Mapping[str, str] | None = None,
        own_imports: bool = False,
    ) -> None:
        """``output`` is where it writes to, by default its log; ``environment`` adds variables.

        What is read at imports needs ``own_imports``.
        """
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_"))}
        kept |= {
            "VLLM_CACHE_ROOT": str(graph_cache()),
            "VLLM_NO_USAGE_STATS": "1",
            **(environment or {}),
        }
        self.log = tmp_path / "server.log"
        command = ["serve", str(checkpoint), *FLAGS, "--host", "127.0.0.1", "--port", "0"]
        command += ["--run-root", str(tmp_path), *flags]
        warm = None if own_imports else warm_process()
        self.started = time.monotonic()
        with (output or self.log).open("wb") as log:
            self.process: subprocess.Popen[bytes] | ForkedProcess
            if warm is None:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "server", *command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=kept,
                )
            else:
                self.process = warm.start(*command, environ=kept, output=log, errors=log)
        self.url = self._until_listening()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def __enter__(self) -> "RealServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def _until_listening(self) -> str:
        while time.monotonic() - self.started < 30:
            for line in self.log.read_text().splitlines() if self.log.exists() else ():
                if "listening on " in line:
                    return line.split("listening on ")[1].split()[0]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(self.log.read_text())

    def until_ready(self) -> dict[str, object]:
        """Wait for readiness and return the probe's body."""
        while time.monotonic() - self.started < READY_TIMEOUT_S:
            answer = self.client.get("/readyz")
            if answer.status_code == 200:
                body: dict[str, object] = answer.json()
                return body
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def reason_of_death(self) -> str:
        """Wait for the end of a start that fails, or of the engine, and return its reason."""
        while (body := self.client.get("/readyz").json())["status"] in ("starting", "ready"):
            assert time.monotonic() - self.started < READY_TIMEOUT_S
            time.sleep(0.02)
        assert body["status"] == "dead"
        return str(body["reason"])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def engine_pid(self) -> int:
        """The process id of the engine, a grandchild by way of the fork server."""
        forked = [pid for child in _children(self.process.pid) for pid in _children(child)]
        # Grammars are tried in another one.
        found = [pid for pid in forked if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()]
        assert len(found) == 1, found
        return found[0]

    def metric(self, start: str) -> float:
        """The sum of the metrics whose line starts so."""
        page = self.client.get("/metrics").text
        return sum(float(x.split()[-1]) for x in page.splitlines() if x.startswith(start))


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not become true"
        time.sleep(0.01)


def descendants(pid: int) -> dict[int, str]:
    """Every process below ``pid``, with its command line or title."""
    found: dict[int, str] = {}
    for child in _children(pid):
        found[child] = Path(f"/proc/{child}/cmdline").read_bytes().decode().replace("\0", " ")
        found |= descendants(child)
    return found


def _children(pid: int) -> list[int]:
    # A process may be started by any thread of its parent.
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]
