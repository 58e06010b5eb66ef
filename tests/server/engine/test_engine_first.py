"""The engine process starts before the tokenizer is loaded, whatever AsyncLLM's own order is."""

from __future__ import annotations

import multiprocessing
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import async_llm

from server.engine.process import engine_first
from server.frontend import LaunchError

CONFIG: Any = SimpleNamespace()


class OfVllm:
    """vLLM's two functions that AsyncLLM calls, which note the order of what they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.events: list[str] = []
        self.fails = fails
        self._is_rendered = threading.Event()
        monkeypatch.setattr(async_llm, "renderer_from_config", self.renderer_from_config)
        monkeypatch.setattr(async_llm, "EngineCoreClient", self)
        monkeypatch.setattr(async_llm.Executor, "get_class", lambda config: object)
        monkeypatch.setattr(async_llm, "load_stat_logger_plugin_factories", list)

    def renderer_from_config(self, config: Any) -> Any:
        self.events.append("tokenizer")
        self._is_rendered.set()
        return SimpleNamespace(start_mm_warmup_in_background=lambda: self.events.append("media"))

    def make_async_mp_client(self, *, renderer: Any, **options: Any) -> Any:
        if self.fails:
            raise RuntimeError("no engine")
        self.events.append("engine")
        renderer.start_mm_warmup_in_background()
        # The engine answers only after the tokenizer was loaded beside it.
        assert self._is_rendered.wait(10)
        return SimpleNamespace(**options)


def made(log_stats: bool = True) -> Any:
    """Call vLLM's functions in AsyncLLM's order; return the client."""
    renderer = async_llm.renderer_from_config(CONFIG)
    return async_llm.EngineCoreClient.make_async_mp_client(
        vllm_config=CONFIG,
        executor_class=object,
        log_stats=log_stats,
        client_addresses=None,
        client_count=1,
        client_index=0,
        renderer=renderer,
    )


def test_the_engine_starts_first_and_loads_while_the_tokenizer_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = OfVllm(monkeypatch)
    with engine_first(CONFIG, log_stats=True):
        client = made()
    assert vllm.events == ["engine", "tokenizer", "media"]
    assert client.vllm_config is CONFIG
    assert async_llm.EngineCoreClient is vllm


def test_an_engine_that_does_not_start_is_an_error_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    OfVllm(monkeypatch, fails=True)
    with engine_first(CONFIG, log_stats=True), pytest.raises(RuntimeError, match="no engine"):
        made()


def test_a_tokenizer_that_cannot_be_read_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = OfVllm(monkeypatch)
    engine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))

    def fail(config: Any) -> Any:
        engine.start()
        vllm.renderer_from_config(config)
        raise OSError("tokenizer.json")

    monkeypatch.setattr(async_llm, "renderer_from_config", fail)
    with pytest.raises(OSError, match="tokenizer"), engine_first(CONFIG, log_stats=True):
        made()
    assert not engine.is_alive()


def test_an_engine_of_other_options_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    OfVllm(monkeypatch)
    with engine_first(CONFIG, log_stats=True), pytest.raises(LaunchError, match="another AsyncLLM"):
        made(log_stats=False)
