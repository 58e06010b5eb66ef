"""Exit with 0 while the server of this container is ready: the image's health check.

The server writes its address to its run directory, so the check follows `--port`, its variable, a
`--config` file and TLS. Run it with `python -IS`: it imports only sockets. Variables:
RBLN_SERVE_RUN_ROOT, if the server has it; HEALTH_CERTFILE, a certificate with its key, if the
server requires client certificates.
"""

from __future__ import annotations

import os
import socket
import sys

_TIMEOUT_S = 4.0


def _newest_url() -> str:
    """Return the address of the latest start. Raises OSError."""
    root = os.environ.get("RBLN_SERVE_RUN_ROOT") or os.environ.get("TMPDIR") or "/tmp"
    urls = [
        os.path.join(entry.path, "url")
        for entry in os.scandir(root)
        if entry.name.startswith("rbln-serve-")
    ]
    written = [path for path in urls if os.path.exists(path)]
    if not written:
        raise FileNotFoundError(f"no server has listened yet: no rbln-serve-*/url in {root}")
    with open(max(written, key=os.path.getmtime), encoding="ascii") as file:
        return file.read().strip()


def _connect(scheme: str, host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), _TIMEOUT_S)
    if scheme == "http":
        return connection
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The peer is this container; its certificate has the clients' name for it.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate := os.environ.get("HEALTH_CERTFILE"):
        context.load_cert_chain(certificate)
    return context.wrap_socket(connection)


def _status(url: str) -> str:
    """Return the status line of the readiness probe."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    with _connect(scheme, host.strip("[]"), int(port)) as connection:
        connection.sendall(b"GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n")
        with connection.makefile("rb") as answer:
            return answer.readline(200).decode("latin-1").strip()


def main() -> int:
    """Print the status for `docker inspect`; return the exit code."""
    try:
        status = _status(_newest_url())
    except (OSError, ValueError) as error:
        print(error)
        return 1
    print(status)
    return 0 if status.split()[1:2] == ["200"] else 1


if __name__ == "__main__":
    sys.exit(main())
