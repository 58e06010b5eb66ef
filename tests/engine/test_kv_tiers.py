"""Prefixes come back from host memory and from files, over restarts, with the same tokens."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from rbln_backend.errors import ConfigError
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
# The context is 256 tokens; the last token of a prompt is always computed.
LENGTHS = [10, 50, 130, 200]


def offloading(folder: Path | None, memory: int = 0, **more: Any) -> dict[str, Any]:
    """vLLM's options for tiers in a folder and in memory."""
    extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": memory}
    if folder is not None:
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder), **more}]
    names = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**names, "kv_connector_extra_config": extra}}


def tokens_of(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each answer, and the cached tokens of each prompt."""
    outputs = engine.generate(prompts, GREEDY)
    written(engine)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, [output.num_cached_tokens for output in outputs]


def written(engine: Engine) -> None:
    """Wait until all pages are stored."""
    store = engine.core.scheduler._reuse.tiers._store
    end = time.monotonic() + 30
    while store._waiting and time.monotonic() < end:
        time.sleep(0.005)
    assert not store._waiting


def is_clean(engine: Engine) -> bool:
    """Return whether nothing of ended requests is left in the tiers' books."""
    tiers = engine.core.scheduler._reuse.tiers
    return engine.used_blocks() == 0 and not (tiers._reading or tiers._asked or tiers._stored)


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("llama", {"block_size": 256}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("deepseek_v2", {}),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.wide),
    ],
)
def test_a_restart_reads_prefixes_from_files(
    engines: Engines, tmp_path: Path, arch: str, options: dict[str, Any]
) -> None:
    prompts = make_prompts(LENGTHS, seed=7)
    plain = engines.fresh(arch, **options).generate(prompts, GREEDY)
    wanted = [list(output.outputs[0].token_ids) for output in plain]
    first = engines.fresh(arch, **options, **offloading(tmp_path))
    assert tokens_of(first, prompts)[0] == wanted
    again = engines.fresh(arch, **options, **offloading(tmp_path))
    tokens, cached = tokens_of(again, prompts)
    assert tokens == wanted
    page = again.core.scheduler._reuse.tiers._layout.tokens
    assert cached == [(length - 1) // page * page for length in LENGTHS]
    assert again.metric("rbln_kv_tier_tokens_total") == sum(cached)
    assert is_clean(first)
    assert is_clean(again)
