"""Ports for servers that cannot choose one themselves."""

import random
import socket

_FIRST, _LAST = 20_000, 32_000
"""Below those that Linux gives to whoever wants any port, which would be taken in between."""


def free_port() -> int:
    """Return a random loopback port without a listener."""
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
