"""A pod of the rendered chart as a process of this machine, started and ended as a kubelet does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.kubernetes.chart import Server


class PodProcess:
    """One replica: the rendered arguments and variables, with this machine's paths and ports."""

    def __init__(self, given: Server, port: int, cache: Path, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._given, self._folder = given, folder
        folder.mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_"))}
        mine = {"VLLM_CACHE_ROOT": str(cache), "RBLN_SERVE_PORT": str(port), "HOME": str(folder)}
        self.env = {**kept, **given.env, **mine, "VLLM_NO_USAGE_STATS": "1"}
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = 0.0
        self._client = httpx.Client(base_url=self.url, timeout=10)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run another command of the image in this pod, as an init container does."""
        return subprocess.run(
            [sys.executable, "-m", "server", *command],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def launch(self) -> None:
        """Start; `until_started` waits."""
        self._begun = time.monotonic()
        command = [sys.executable, "-m", "server", "serve", *self._given.container["args"]]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self.env, stdout=log, stderr=subprocess.STDOUT
            )

    def until_started(self) -> float:
        """Return seconds until /startupz, for which its probe must have patience."""
        process, begun = self._process, self._begun
        assert process is not None
        patience_s = self._given.patience_s("startup")
        while not self.probe("startup"):
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() - begun < patience_s, "a kubelet would have killed it"
            time.sleep(0.05)
        return time.monotonic() - begun

    def probe(self, name: str) -> bool:
        """Whether a probe succeeds, in its own time."""
        probe = self._given.container[f"{name}Probe"]
        try:
            path, patience_s = probe["httpGet"]["path"], probe["timeoutSeconds"]
            return self._client.get(path, timeout=patience_s).status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> float:
        """End as a pod does: preStop, SIGTERM, SIGKILL after the grace period; returns seconds."""
        process = self._process
        assert process is not None
        begun = time.monotonic()
        time.sleep(self._given.container["lifecycle"]["preStop"]["sleep"]["seconds"])
        assert self.probe("readiness"), "the server stopped serving before it was told to"
        process.send_signal(signal.SIGTERM)
        left_s = self._given.pod["terminationGracePeriodSeconds"] - (time.monotonic() - begun)
        # A time-out is where a kubelet would kill it.
        assert process.wait(left_s) == 0, self.log.read_text()
        return time.monotonic() - begun

    def close(self) -> None:
        self._client.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
