"""Debian's nginx with deploy/nginx/nginx.conf, on ports of the test."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from deploy.kubernetes.generate import CHART
from tests.debian_tools import debian_tool

CONFIG = CHART.parents[1] / "nginx" / "nginx.conf"


class Nginx:
    """One nginx; `replicas` are the ports behind it."""

    def __init__(self, port: int, replicas: Sequence[int], folder: Path) -> None:
        # Its workers, which are another user's where root starts it, pass through.
        folder.mkdir(0o711)
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "access.log"
        program = debian_tool("nginx")
        text = CONFIG.read_text(encoding="utf-8")
        for old, new in zip((8001, 8002), replicas, strict=True):
            text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
        text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
        text = text.replace("/dev/stdout", str(self.log))
        config = folder / "nginx.conf"
        config.write_text(text, encoding="utf-8")
        command = [program, "-p", str(folder), "-c", str(config)]
        self._errors = folder / "error.log"
        with self._errors.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "-e", "stderr", "-g", "daemon off;"], stdout=log, stderr=log
            )

    def until_listening(self) -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            assert self._process.poll() is None, self._errors.read_text()
            try:
                assert httpx.get(f"{self.url}/metrics").status_code == 404
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError(self._errors.read_text())

    def passed_on(self) -> list[str]:
        """The lines of requests that more than one replica was asked for."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if ", " in line.rpartition('"')[2]]

    def close(self) -> None:
        """End nginx, its workers included."""
        self._process.terminate()
        self._process.wait(10)
