"""A server of ours with what the suite asks for: keys, tools, traces, over a tiny model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.conformance.collector import collecting
from tests.conformance.target import Target
from tests.server.real_server import RealServer

API_KEY = "sk-conformance"
ADMIN_KEY = "sk-conformance-admin"
# The last of two flags counts: tools and their calls need more room than other tests.
FLAGS = (
    "--enable-tokenizer-info-endpoint",
    *"--enable-auto-tool-choice --tool-call-parser hermes".split(),
    "--max-model-len",
    "512",
)


@contextmanager
def own_server(checkpoints: CheckpointCache, folder: Path) -> Iterator[Target]:
    """Serve until the end of the block, with traces and logs to look at.

    Keys come from a file, where the process list has none.
    """
    keys = folder / "keys"
    keys.write_text(f"suite={API_KEY}\n", encoding="utf-8")
    admin_keys = folder / "admin-keys"
    admin_keys.write_text(f"operator={ADMIN_KEY}\n", encoding="utf-8")
    access = ("--api-key-file", str(keys), "--admin-key-file", str(admin_keys))
    checkpoint = checkpoints("llama", dtype="float32", seed=1)
    stored = ("--data-dir", str(folder / "data"), "--min-free-bytes", "0")
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        # Otherwise spans leave every five seconds.
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        observed = ("--otlp-traces-endpoint", collector.endpoint, "--log-format", "json")
        with RealServer(checkpoint, folder, *FLAGS, *access, *stored, *observed) as server:
            server.until_ready()
            seen = {"log": server.log, "collector": collector}
            yield Target(server.url, API_KEY, "tiny", ours=True, **seen)
