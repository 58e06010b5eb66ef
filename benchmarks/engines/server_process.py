"""Servers of a measurement as child processes, started to be ready and stopped while not measured.

Invariant: outside ``ServerProcess.awake()`` every process of the server is stopped (SIGSTOP).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from benchmarks.engines.engine_process import (
    CpuSeconds,
    Memory,
    SleepingProcess,
    clean_environment,
    cpu_seconds,
    descendants,
    memory,
)

STARTUP_TIMEOUT_S = 900.0
_EXIT_TIMEOUT_S = 15.0
_POLL_S = 0.05


class ServerError(Exception):
    """A server did not start, answer or end as it should; the message has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Model and sizes of a server; `text_model` has a tokenizer, `gguf` is the same model.

    `chunk_tokens` is the prefill chunk of both vLLM flavours; None leaves each its default.
    """

    text_model: Path
    gguf: Path
    port: int
    max_model_len: int
    kv_cache_bytes: int
    chunk_tokens: int | None = None

    @classmethod
    def of(cls, folder: Path, max_model_len: int = 0, kv_cache_bytes: int = 0) -> Serving:
        """Return the settings of a server of `folder` on a free port, without a GGUF."""
        return cls(
            text_model=folder,
            gguf=folder,
            port=free_port(),
            max_model_len=max_model_len,
            kv_cache_bytes=kv_cache_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSide:
    """Server of one side. `fields` go into every request; `ready` is polled for a 200.

    `serial` servers answer one request at a time.
    """

    name: str
    note: str
    command: Callable[[Serving], list[str]]
    ready: str
    env: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    serial: bool = False

    def with_flags(self, *flags: str, name: str | None = None) -> ServerSide:
        """Return this side with more flags, and another name if one is given."""
        command = self.command
        return replace(
            self, name=name or self.name, command=lambda serving: [*command(serving), *flags]
        )


def free_port() -> int:
    """Return a loopback port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess(SleepingProcess):
    """One server in a session of its own; ``__enter__`` returns when it has answered a request.

    `listening_s`, `ready_s` and `answered_s` are seconds from process start to the first accepted
    connection, the first 200 of `side.ready` and the end of a completion of one token.
    """

    def __init__(
        self,
        side: ServerSide,
        serving: Serving,
        log: Path | None = None,
        cache_root: Path | None = None,
    ) -> None:
        self.side = side
        self.serving = serving
        self.listening_s = self.ready_s = self.answered_s = 0.0
        if log is not None:
            self.log = log
        self._env = clean_environment(side.env)
        if cache_root is not None:
            self._env["VLLM_CACHE_ROOT"] = str(cache_root)

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._started = time.perf_counter()
            self._process = subprocess.Popen(
                self.side.command(self.serving),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env=self._env,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self._end()
            raise
        return self

    def body(self, prompt: str, output_tokens: int) -> dict[str, Any]:
        """Return the body of a greedy, streamed completion."""
        return {
            "model": str(self.serving.text_model),
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "stream": True,
            **self.side.fields,
        }

    def cpu_seconds(self) -> CpuSeconds:
        """Return the CPU time used so far."""
        return cpu_seconds(self._process.pid)

    def memory(self) -> Memory:
        """Return the current memory of the server's processes."""
        return memory(self._process.pid)

    def error(self, what: str) -> ServerError:
        """Return an error with the event `what` and the end of this server's log."""
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return ServerError("\n".join([f"server {self.side.name!r} {what}; its log ends:", *tail]))

    def _wait_until_ready(self) -> None:
        while True:
            if self._process.poll() is not None:
                raise self.error(f"ended with status {self._process.returncode}")
            elapsed = time.perf_counter() - self._started
            if elapsed > STARTUP_TIMEOUT_S:
                raise self.error(f"was not ready in {STARTUP_TIMEOUT_S:.0f} s")
            status = self._get(self.side.ready)
            elapsed = time.perf_counter() - self._started
            if status is not None and not self.listening_s:
                self.listening_s = elapsed
            if status == 200:
                break
            time.sleep(_POLL_S)
        self.ready_s = time.perf_counter() - self._started
        self._complete_one_token()
        self.answered_s = time.perf_counter() - self._started

    def _get(self, path: str) -> int | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.serving.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _complete_one_token(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.serving.port, timeout=300)
        try:
            body = json.dumps(self.body(" bake domi", 1))
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.error(f"gave no completion: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise self.error(f"answered {answer.status}: {text[:300].decode(errors='replace')}")

    def _end(self) -> None:
        """Send SIGTERM to the HTTP process, which ends its children; then SIGKILL to all."""
        tree = descendants(self._process.pid)
        with suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while any(_is_alive(pid) for pid in tree) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(_POLL_S)
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
