"""nginx.conf as it lies there: what it writes, and where."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.kubernetes.nginx_process import Nginx, free_ports

BODY = b"x" * 1_000_000


class _Replica(BaseHTTPRequestHandler):
    """Answers with the number of bytes that it got."""

    def do_POST(self) -> None:
        got = len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(got).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def replica() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Replica) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def _named_for_nginx(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*nginx*")}


def test_it_writes_in_the_folder_that_it_was_given_and_nowhere_else(replica: int) -> None:
    temporary = Path(tempfile.gettempdir())
    before = _named_for_nginx(temporary)
    with tempfile.TemporaryDirectory(prefix="rbln-proxy-") as folder:
        Path(folder).chmod(0o711)
        (port,) = free_ports(1)
        nginx = Nginx(port, (replica, replica), Path(folder) / "run")
        try:
            nginx.until_listening()
            answer = httpx.post(f"{nginx.url}/v1/completions", content=BODY)
            assert (answer.status_code, answer.text) == (200, str(len(BODY)))
            large = BODY * 5
            answer = httpx.post(f"{nginx.url}/v1/files", content=large)
            assert (answer.status_code, answer.text) == (200, str(len(large)))
            assert httpx.post(f"{nginx.url}/v1/completions", content=large).status_code == 413
            made = {path.name for path in (Path(folder) / "run").iterdir()}
            assert {"nginx.pid", "body", "proxy"} <= made
            assert _named_for_nginx(temporary) == before
        finally:
            nginx.close()
