"""Models that attend in both directions pool as transformers does in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from vllm import PoolingParams
from vllm.config import PoolerConfig
from vllm.model_executor.models.bert import TOKEN_TYPE_SHIFT

from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.pooling_checkpoints import encoder
from tests.pooling_reference import class_logits, hidden_states, pooled

pytestmark = pytest.mark.engine

# Both sides of each bucket (16 to 256); most leave padding in their graph.
LENGTHS = [1, 2, 15, 16, 17, 64, 65, 100, 255, 256]
FAMILIES = ["Bert", "XLMRoberta", "ModernBert"]
TOLERANCE = 1e-4


def encode(engine: Engine, prompts: list[list[int]], task: str, **params: Any) -> list[Tensor]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    wish = PoolingParams(**params) if params else None
    outputs = engine.llm.encode(inputs, wish, pooling_task=task, use_tqdm=False)
    return [output.outputs.data for output in outputs]


def assert_close(actual: Tensor, expected: Tensor, about: str) -> None:
    assert actual.shape == expected.shape, about
    assert (actual - expected).abs().max() < TOLERANCE, about


@pytest.mark.parametrize(
    "family",
    # The next test has it.
    [pytest.param(x, marks=pytest.mark.wide if x == "ModernBert" else ()) for x in FAMILIES],
)
def test_the_first_token_pools(engines: Engines, tmp_path: Path, family: str) -> None:
    checkpoint = encoder(family, engines.checkpoints("llama"), tmp_path / family)
    engine = engines.fresh(checkpoint=checkpoint, enable_chunked_prefill=True)
    # A prompt is one run, whatever the configured chunk, and none of it is cached.
    assert engine.core.vllm_config.scheduler_config.max_num_batched_tokens == 256
    assert engine.metric("rbln_device_memory_bytes", kind="kv") == 0
    prompts = make_prompts(LENGTHS, seed=60)
    for prompt, actual in zip(prompts, encode(engine, prompts, "embed"), strict=True):
        assert_close(actual, pooled(checkpoint, prompt, "CLS"), f"{len(prompt)} tokens")
    assert engine.total("rbln_bucket_steps_total", phase="pooling") == len(prompts)


@pytest.mark.parametrize("family", [pytest.param("Bert", marks=pytest.mark.wide), "ModernBert"])
def test_every_token_and_their_mean(engines: Engines, tmp_path: Path, family: str) -> None:
    checkpoint = encoder(family, engines.checkpoints("llama"), tmp_path / family)
    prompts = make_prompts([1, 17, 70], seed=61)
    options: dict[str, Any] = {"checkpoint": checkpoint, "enable_chunked_prefill": True}
    tokens = engines.fresh(**options, pooler_config=PoolerConfig(task="token_embed"))
    for prompt, actual in zip(prompts, encode(tokens, prompts, "token_embed"), strict=True):
        expected = normalize(hidden_states(checkpoint, prompt), dim=-1)
        assert_close(actual, expected, f"{len(prompt)} tokens")
    mean = engines.fresh(**options, pooler_config=PoolerConfig(seq_pooling_type="MEAN"))
    for prompt, actual in zip(prompts, encode(mean, prompts, "embed"), strict=True):
        assert_close(actual, pooled(checkpoint, prompt, "MEAN"), f"{len(prompt)} tokens")


def test_a_decoder_made_to_look_ahead(engines: Engines) -> None:
    engine = engines.fresh(
        "qwen3",
        runner="pooling",
        convert="embed",
        hf_overrides={"is_causal": False},
        enable_chunked_prefill=True,
    )
    prompts = make_prompts([1, 16, 65, 200], seed=62)
    for prompt, actual in zip(prompts, encode(engine, prompts, "embed"), strict=True):
        rows = hidden_states(engine.checkpoint, prompt, sees_all=True)
        assert_close(actual, normalize(rows[-1], dim=-1), f"{len(prompt)} tokens")


def test_a_cross_encoder_tells_query_from_document(engines: Engines, tmp_path: Path) -> None:
    checkpoint = encoder("Bert", engines.checkpoints("llama"), tmp_path / "pairs", num_labels=1)
    engine = engines.fresh(checkpoint=checkpoint, enable_chunked_prefill=True)
    (prompt,) = make_prompts([40], seed=63)
    scores: list[float] = []
    for start in (None, 10, 39):
        params = {} if start is None else {"extra_kwargs": {"compressed_token_type_ids": start}}
        (actual,) = encode(engine, [prompt], "classify", **params)
        expected = class_logits(checkpoint, prompt, document_start=start).sigmoid()
        assert_close(actual, expected, f"document from {start}")
        scores.append(float(actual))
    assert len(set(scores)) == 3
    assert TOKEN_TYPE_SHIFT == 30, "ids with their mark must fit into 32 bits"


def test_an_encoder_cannot_generate(engines: Engines) -> None:
    with pytest.raises(Exception, match="no attention layer with a KV cache"):
        engines.fresh("qwen3", hf_overrides={"is_causal": False})


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.wide)])
def test_a_half_precision_encoder(engines: Engines, tmp_path: Path, dtype: str) -> None:
    checkpoint = encoder("Bert", engines.checkpoints("llama"), tmp_path / "half")
    engine = engines.fresh(checkpoint=checkpoint, dtype=dtype, enable_chunked_prefill=True)
    prompts = make_prompts([5, 70], seed=64)
    for prompt, actual in zip(prompts, encode(engine, prompts, "embed"), strict=True):
        assert torch.isfinite(actual).all()
        assert float(actual @ pooled(checkpoint, prompt, "CLS")) > 0.99
