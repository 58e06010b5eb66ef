"""Environment of measured servers: that of an installation, whatever the shell has set."""

from __future__ import annotations

import pytest

from benchmarks.engines.engine_process import clean_environment


def test_measured_servers_have_bytecode_and_no_settings_of_the_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("VLLM_RBLN_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    environment = clean_environment({"VLLM_PLUGINS": "rbln"})
    assert {"PYTHONDONTWRITEBYTECODE", "VLLM_RBLN_NUM_THREADS"}.isdisjoint(environment)
    assert (environment["VLLM_CACHE_ROOT"], environment["VLLM_PLUGINS"]) == ("/cache", "rbln")
