"""Adapters of a model that pools: the vectors of merged weights, in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.lora.request import LoRARequest

from tests.adapters import make_adapter, merge
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.engine.test_lora import LORA
from tests.engine.test_pooling import EMBED, assert_close
from tests.pooling_reference import pooled

pytestmark = pytest.mark.engine


def embed(
    engine: Engine, prompts: list[list[int]], adapters: list[LoRARequest | None]
) -> list[Tensor]:
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.encode(inputs, pooling_task="embed", use_tqdm=False, lora_request=adapters)
    return [output.outputs.data for output in outputs]


def test_vectors_are_those_of_merged_weights(engines: Engines, tmp_path: Path) -> None:
    engine = engines.fresh("qwen3", **EMBED, **LORA)
    prompts = make_prompts([1, 65, 66, 130], seed=45)
    adapters: list[LoRARequest | None] = [None, None, None, None]
    checkpoints = [engine.checkpoint] * len(prompts)
    for number, place in ((1, 1), (2, 3)):
        folder = make_adapter(engine.checkpoint, tmp_path / f"a{number}", rank=16, seed=number)
        adapters[place] = LoRARequest(f"a{number}", number, str(folder))
        checkpoints[place] = merge(engine.checkpoint, folder, tmp_path / f"merged-{number}")
    together = embed(engine, prompts, adapters)
    for prompt, path, actual in zip(prompts, checkpoints, together, strict=True):
        assert_close(actual, pooled(path, prompt, "LAST"), path.name)
    # The same prompt by another adapter is another vector, and its blocks are not shared.
    (plain,) = embed(engine, prompts[1:2], [None])
    assert_close(plain, pooled(engine.checkpoint, prompts[1], "LAST"), "without")
    assert not torch.allclose(plain, together[1], atol=1e-2)
    assert engine.total("rbln_recompiles_after_warmup_total") == 0
