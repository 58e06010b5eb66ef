"""Fixtures of the conformance suite: the server under test and clients of it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.conformance.own_server import own_server
from tests.conformance.target import Target


@pytest.fixture(scope="package")
def target(
    request: pytest.FixtureRequest,
    checkpoints: CheckpointCache,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    """The server that --base-url names, else one of ours over a tiny model."""
    base_url = request.config.getoption("--base-url")
    if base_url is None:
        with own_server(checkpoints, tmp_path_factory.mktemp("conformance")) as started:
            yield started
        return
    api_key = request.config.getoption("--api-key")
    model = request.config.getoption("--model")
    root = str(base_url).rstrip("/").removesuffix("/v1")
    found = Target(root, api_key, model or "")
    if not model:
        found = Target(root, api_key, next(iter(found.sdk().models.list())).id)
    yield found


@pytest.fixture
def model(target: Target) -> str:
    return target.model


@pytest.fixture
def client(target: Target) -> Iterator[openai.OpenAI]:
    with target.sdk() as client:
        yield client


@pytest.fixture
async def async_client(target: Target) -> AsyncIterator[openai.AsyncOpenAI]:
    async with target.async_sdk() as client:
        yield client


@pytest.fixture
def http(target: Target) -> Iterator[httpx.Client]:
    with target.http() as client:
        yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of these tests needs a server with an engine."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
