"""The server under test, and how a case says that the server lacks what it is about."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
import openai
import pytest

from tests.conformance.collector import Collector

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Target:
    """A server; `base_url` is its root, without /v1. `ours`: one that this suite has started.

    One of ours has a `log`, and sends its spans to a `collector`.
    """

    base_url: str
    api_key: str | None
    model: str
    ours: bool = False
    log: Path | None = None
    collector: Collector | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, headers=self.headers, timeout=TIMEOUT_S)

    def sdk(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._sdk_options(options))

    def async_sdk(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._sdk_options(options))

    def _sdk_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "base_url": f"{self.base_url}/v1",
            "api_key": self.api_key or "none",
            "max_retries": 0,
            "timeout": TIMEOUT_S,
            **options,
        }


def absent(what: str) -> NoReturn:
    """Skip the case: the server does not have what it is about, and says so."""
    pytest.skip(f"the server has no {what}")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the error object of a refusal, which has OpenAI's form; its code is a case apart."""
    assert answer.headers["content-type"].startswith("application/json"), answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert "param" in error
    return error
