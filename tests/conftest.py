"""Fixtures of every test: a clean environment and tiny checkpoints."""

import gc
import logging
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from hypothesis import settings

from tests.debian_tools import pytest_terminal_summary  # noqa: F401 (a hook)
from tests.warm_process import run_address

if TYPE_CHECKING:
    from tests.checkpoints import CheckpointCache

# A busy machine is no fault of what is tested.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the developer's own RBLN settings, so that a test sees only what it sets."""
    for name in list(os.environ):
        if name.startswith(("VLLM_RBLN_", "RBLN_")):
            monkeypatch.delenv(name)


@pytest.fixture
def caplog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """See all records of our loggers, which commands and engines of this process send elsewhere."""
    dispatch, seen = logging.Logger.callHandlers, caplog.handler
    # vLLM's SageMaker routes import a package that raises the levels of the root logger and of its
    # handlers to ERROR; pytest has one handler for all tests.
    seen.setLevel(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)

    def see(logger: logging.Logger, record: logging.LogRecord) -> None:
        dispatch(logger, record)
        ours = logger.name.partition(".")[0] in ("server", "rbln_backend")
        if not ours or record.levelno < seen.level:
            return
        if not any(record is old for old in seen.records):
            seen.handle(record)

    monkeypatch.setattr(logging.Logger, "callHandlers", see)
    return caplog


@pytest.fixture(scope="session")
def checkpoints() -> "CheckpointCache":
    """Make checkpoints on demand: `checkpoints("llama", dtype="bfloat16", num_hidden_layers=2)`.

    They are kept in the user's cache folder between runs, under a hash of the code that makes them.
    """
    # The process that hands tests to workers does not wait for the import of torch.
    from tests.checkpoints import CheckpointCache

    return CheckpointCache(Path.home() / ".cache" / "rbln-serve" / "test-checkpoints")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from modules and tests, a million objects that stay."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mix modules that wait with modules that compute: neighbours do the same, and cores idle."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: crc32(item.nodeid.partition("::")[0].encode()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork workers from the process that has imported vLLM: imports are most of their start."""
    # Coverage begins before the imports of what it covers.
    if getattr(config.option, "cov_source", None):
        return
    run_address()
    for spec in specs:
        spec.python = f"{sys.executable} -m tests.warm_process"


def pytest_addoption(parser: pytest.Parser) -> None:
    """For kernels, tests/image and tests/conformance; only this conftest can make options."""
    parser.addoption("--kernel-variant", help="one of kernel_cache.VARIANTS")
    parser.addoption("--image-folder", help="tests/image: what build_image.sh built there is run")
    parser.addoption("--base-url", help="tests/conformance: the server to test, not one of ours")
    parser.addoption("--api-key", help="tests/conformance: a key of that server")
    parser.addoption("--model", help="tests/conformance: a model of it; unset, its first")
