"""Commands that ask vLLM, without its imports each time."""

import pytest

from tests.warm_process import WarmProcess, warm_process

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="session")
def warm_cli() -> WarmProcess:
    return warm_process()
