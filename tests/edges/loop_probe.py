"""How long a server's event loop is held, seen from outside: by how late it answers /livez."""

import http.client
import threading
import time
from pathlib import Path
from typing import Self

_PERIOD_S = 0.004
_TIMEOUT_S = 60.0


class LoopProbe:
    """Asks for /livez all the time, from a thread of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._end = threading.Event()
        self._worst = 0.0
        self._answers = 0
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(_TIMEOUT_S)

    def take_worst_s(self) -> float:
        """Return the longest wait for an answer since the last call, in seconds."""
        # What is under way counts for what was done before this call, however long it takes.
        after = self._answers + 2
        deadline = time.monotonic() + _TIMEOUT_S
        while self._answers < after and time.monotonic() < deadline:
            time.sleep(_PERIOD_S)
        worst, self._worst = self._worst, 0.0
        return worst

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
        while not self._end.is_set():
            asked = time.perf_counter()
            try:
                connection.request("GET", "/livez")
                connection.getresponse().read()
            except (http.client.HTTPException, OSError):
                connection.close()
            self._worst = max(self._worst, time.perf_counter() - asked)
            self._answers += 1
            time.sleep(_PERIOD_S)
        connection.close()


def own_bytes(pid: int) -> int:
    """Return the memory of a process in bytes, what it shares with others in equal parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")
