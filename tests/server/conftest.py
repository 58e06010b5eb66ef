"""The official SDK for the `server` fixture of a module."""

import openai
import pytest

from tests.server.real_server import RealServer


@pytest.fixture(scope="module")
def client(server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
