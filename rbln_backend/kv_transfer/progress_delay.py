"""Lets NIXL's thread sleep between events: it polls without a pause, which takes a whole core.

nixl 1.5 sets the pause to 0 where it makes an agent, without an option. The cores here compute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rbln_backend.vllm_compat.kv_connector import NixlWrapper

# The thread wakes for events of sockets; what else it has to do waits at most so long.
_PAUSE_US = 1000


@contextmanager
def sleeping_progress() -> Iterator[None]:
    """Make agents whose thread pauses for 1 ms; a nixl without the setting keeps its own."""
    api: Any = sys.modules.get(getattr(NixlWrapper, "__module__", ""))
    bindings = getattr(api, "nixlBind", None)
    if bindings is None or not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
        yield
        return
    api.nixlBind = _PausingBindings(bindings)
    try:
        yield
    finally:
        api.nixlBind = bindings


class _PausingBindings:
    """NIXL's bindings with a configuration of agents whose pause cannot be set to 0."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bindings, name)
        return _pausing(found) if name == "nixlAgentConfig" else found


def _pausing(base: Any) -> Any:
    """Return a class like ``base``, nixl's, that ignores the pause that it is given."""

    def read(config: Any) -> Any:
        return base.pthrDelay.__get__(config)

    def write(config: Any, _: Any) -> None:
        base.pthrDelay.__set__(config, _PAUSE_US)

    return type("PausingAgentConfig", (base,), {"pthrDelay": property(read, write)})
