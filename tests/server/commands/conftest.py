"""Commands that ask vLLM, without its imports each time."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.server.commands.warm_cli import WarmCli

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="session")
def warm_cli() -> Iterator[WarmCli]:
    with WarmCli({**os.environ, **OFFLINE}) as warm:
        yield warm
