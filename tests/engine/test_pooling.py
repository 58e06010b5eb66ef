"""Pooled vectors equal transformers in float32, however a prompt is cut up or shared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from vllm import PoolingParams
from vllm.config import PoolerConfig
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.bert import TOKEN_TYPE_SHIFT

from tests.engine.conftest import Engine, Engines
from tests.engine.support import make_prompts
from tests.pooling_checkpoints import (
    bare_model,
    class_logits,
    classifier,
    encoder,
    hidden_states,
    pooled,
    sentence_transformer,
)

pytestmark = pytest.mark.engine

# One token, both sides of a block (16) and of a chunk (64), one token left for a last chunk, and
# a prompt as long as the context.
LENGTHS = [1, 2, 16, 17, 63, 64, 65, 129, 200, 255, 256]
# As the server's command line has it: vLLM requires the option for some poolers.
EMBED: dict[str, Any] = {"runner": "pooling", "convert": "embed", "enable_chunked_prefill": True}
# Few graphs, where chunks are not the subject.
ONE_CHUNK = {"prefill_chunk_buckets": [64]}
TOLERANCE = 1e-4


def encode(engine: Engine, prompts: list[list[int]], task: str, **params: Any) -> list[Any]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    wish = PoolingParams(**params) if params else None
    outputs: list[Any] = engine.llm.encode(inputs, wish, pooling_task=task, use_tqdm=False)
    return outputs


def vectors(
    engine: Engine, prompts: list[list[int]], task: str = "embed", **params: Any
) -> list[Tensor]:
    return [output.outputs.data for output in encode(engine, prompts, task, **params)]


def assert_close(actual: Tensor, expected: Tensor, about: str) -> None:
    assert actual.shape == expected.shape, about
    assert (actual - expected).abs().max() < TOLERANCE, about


@pytest.mark.parametrize(
    "arch",
    [
        # Full attention alone, and with windows.
        "llama",
        "gemma3_text",
        *(pytest.param(x, marks=pytest.mark.wide) for x in ("qwen2", "qwen3", "mistral")),
    ],
)
def test_the_last_token_pools(engines: Engines, arch: str) -> None:
    engine = engines.fresh(arch, **EMBED)
    prompts = make_prompts(LENGTHS, seed=40)
    together = vectors(engine, prompts)
    for prompt, actual in zip(prompts, together, strict=True):
        expected = pooled(engine.checkpoint, prompt, "LAST")
        assert_close(actual, expected, f"prompt of {len(prompt)} tokens")
    # Company changes no bit: every kernel is batch invariant, and so is a host that pools alone.
    assert torch.equal(vectors(engine, [prompts[6]])[0], together[6])
    assert engine.used_blocks() == 0


def test_a_pooling_engine_has_pooling_graphs_alone(engines: Engines) -> None:
    engine = engines.fresh("llama", **EMBED)
    vectors(engine, make_prompts([1, 65], seed=41))
    assert engine.total("rbln_graphs") == engine.total("rbln_graphs", kind="pooling") > 0
    assert engine.total("rbln_bucket_steps_total", phase="pooling") == 3
    assert engine.total("rbln_bucket_steps_total") == 3
    assert engine.total("rbln_prefill_useful_tokens_total") == 66


@pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
def test_poolers_of_whole_prompts_get_all_chunks(engines: Engines, pooling: str) -> None:
    # vLLM wants these in one step and would need a chunk of max_model_len tokens.
    engine = engines.fresh(
        "qwen3",
        **EMBED,
        pooler_config=PoolerConfig(pooling_type=pooling),
        enable_prefix_caching=True,
    )
    prompts = make_prompts(LENGTHS, seed=42)
    for _ in range(2):
        # The second time every prompt would be a prefix hit, had it not been switched off.
        for prompt, actual in zip(prompts, vectors(engine, prompts), strict=True):
            expected = pooled(engine.checkpoint, prompt, pooling)
            assert_close(actual, expected, f"prompt of {len(prompt)} tokens")


def test_every_token_pools_past_prefix_hits(engines: Engines) -> None:
    engine = engines.fresh("qwen3", **EMBED, pooler_config=PoolerConfig(task="token_embed"))
    assert engine.core.vllm_config.cache_config.enable_prefix_caching
    prompts = make_prompts([1, 64, 65, 150, 256], seed=43)
    for _ in range(2):
        for prompt, output in zip(prompts, encode(engine, prompts, "token_embed"), strict=True):
            assert output.num_cached_tokens == 0
            expected = normalize(hidden_states(engine.checkpoint, prompt), dim=-1)
            assert_close(output.outputs.data, expected, f"prompt of {len(prompt)} tokens")


def test_a_prefix_hit_changes_no_bit(engines: Engines) -> None:
    engine = engines.fresh("qwen3", **EMBED)
    (prompt,) = make_prompts([150], seed=44)
    # The second leaves one token to compute, which would be a decode of a model that generates.
    for number, wanted in enumerate([prompt[:145], prompt[:145], prompt]):
        (output,) = encode(engine, [wanted], "embed")
        assert output.num_cached_tokens == (0, 144, 144)[number]
        assert_close(
            output.outputs.data, pooled(engine.checkpoint, wanted, "LAST"), f"request {number}"
        )


def test_results_outlive_the_steps_after_them(engines: Engines) -> None:
    engine = engines.fresh(
        "qwen3", **EMBED, pooler_config=PoolerConfig(task="token_embed", use_activation=False)
    )
    # One chunk each, of the same graph, and nothing that copies between graph and client.
    prompts = make_prompts([60, 61, 62], seed=45)
    outputs = encode(engine, prompts, "token_embed")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_close(
            output.outputs.data, hidden_states(engine.checkpoint, prompt), str(len(prompt))
        )


def test_a_bare_decoder_pools_by_itself(engines: Engines, tmp_path: Path) -> None:
    checkpoint = bare_model(engines.checkpoints("llama"), tmp_path / "bare")
    engine = engines.fresh(checkpoint=checkpoint, runner="pooling", rbln=ONE_CHUNK)
    assert engine.core.get_supported_tasks() == ("embed", "token_embed")
    (prompt,) = make_prompts([100], seed=46)
    (actual,) = vectors(engine, [prompt])
    assert_close(actual, pooled(checkpoint, prompt, "LAST"), "LlamaModel")


def test_sentence_transformers_files_are_obeyed(engines: Engines, tmp_path: Path) -> None:
    dense = torch.randn(96, 128, generator=torch.Generator().manual_seed(6)) / 10
    checkpoint = sentence_transformer(
        engines.checkpoints("qwen3"), tmp_path / "st", dense=dense, matryoshka_dimensions=[32, 96]
    )
    engine = engines.fresh(checkpoint=checkpoint, rbln=ONE_CHUNK)
    (prompt,) = make_prompts([90], seed=47)
    projected = dense @ hidden_states(checkpoint, prompt)[-1]
    for dimensions in (None, 96, 32):
        (actual,) = vectors(engine, [prompt], dimensions=dimensions)
        assert_close(actual, normalize(projected[:dimensions], dim=-1), f"dimensions {dimensions}")
    (raw,) = vectors(engine, [prompt], use_activation=False)
    assert_close(raw, projected, "not normalised")
    with pytest.raises(VLLMValidationError, match="dimensions"):
        vectors(engine, [prompt], dimensions=33)


def test_a_classifier_scores_the_last_token(engines: Engines, tmp_path: Path) -> None:
    checkpoint = classifier(engines.checkpoints("qwen3"), tmp_path / "classifier", num_labels=3)
    engine = engines.fresh(checkpoint=checkpoint, rbln=ONE_CHUNK)
    prompts = make_prompts([1, 65, 140], seed=48)
    for prompt, output in zip(prompts, encode(engine, prompts, "classify"), strict=True):
        expected = class_logits(checkpoint, prompt).softmax(-1)
        assert_close(output.outputs.data, expected, f"prompt of {len(prompt)} tokens")


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.wide), "float16"])
def test_a_half_precision_model_pools_in_float32(engines: Engines, dtype: str) -> None:
    # By default vLLM converts float32 checkpoints of pooling models to float16.
    engine = engines.fresh("qwen3", **EMBED, dtype=dtype, rbln=ONE_CHUNK)
    prompts = make_prompts([5, 130], seed=49)
    for prompt, actual in zip(prompts, vectors(engine, prompts), strict=True):
        assert actual.dtype == torch.float32
        assert actual.norm() == pytest.approx(1.0, abs=1e-5)
        expected = pooled(engine.checkpoint, prompt, "LAST")
        assert float(actual @ expected) > 0.99


def test_an_aborted_prompt_leaves_nothing_behind(engines: Engines) -> None:
    engine = engines.fresh("qwen3", **EMBED, pooler_config=PoolerConfig(pooling_type="MEAN"))
    first, second = make_prompts([200, 150], seed=50)
    llm_engine = engine.llm.llm_engine
    llm_engine.add_request("gone", {"prompt_token_ids": first}, PoolingParams(task="embed"))
    llm_engine.step()
    llm_engine.abort_request(["gone"])
    (actual,) = vectors(engine, [second])
    assert_close(actual, pooled(engine.checkpoint, second, "MEAN"), "after an abort")
    runner = engine.core.model_executor.driver_worker.worker._runner
    assert not runner._pooler._rows
    assert engine.used_blocks() == 0


# ----------------------------------------------------------------------------------------- encoders
# Both sides of each bucket (16 to 256); most leave padding in their graph.
ENCODER_LENGTHS = [1, 2, 15, 16, 17, 64, 65, 100, 255, 256]
FAMILIES = ["Bert", "XLMRoberta", "ModernBert"]
WHOLE = {"prefill_chunk_buckets": [256]}


@pytest.mark.parametrize(
    "family",
    # The next test has ModernBert.
    [pytest.param(x, marks=() if x == "Bert" else pytest.mark.wide) for x in FAMILIES],
)
def test_the_first_token_pools(engines: Engines, tmp_path: Path, family: str) -> None:
    checkpoint = encoder(family, engines.checkpoints("llama"), tmp_path / family)
    engine = engines.fresh(checkpoint=checkpoint, enable_chunked_prefill=True)
    # A prompt is one run, whatever the configured chunk, and none of it is cached.
    assert engine.core.vllm_config.scheduler_config.max_num_batched_tokens == 256
    assert engine.metric("rbln_device_memory_bytes", kind="kv") == 0
    prompts = make_prompts(ENCODER_LENGTHS, seed=60)
    for prompt, actual in zip(prompts, vectors(engine, prompts), strict=True):
        assert_close(actual, pooled(checkpoint, prompt, "CLS"), f"{len(prompt)} tokens")
    assert engine.total("rbln_bucket_steps_total", phase="pooling") == len(prompts)


@pytest.mark.parametrize("family", [pytest.param("Bert", marks=pytest.mark.wide), "ModernBert"])
def test_every_token_and_their_mean(engines: Engines, tmp_path: Path, family: str) -> None:
    checkpoint = encoder(family, engines.checkpoints("llama"), tmp_path / family)
    prompts = make_prompts([1, 17, 70], seed=61)
    options: dict[str, Any] = {"checkpoint": checkpoint, "enable_chunked_prefill": True}
    options["rbln"] = WHOLE
    tokens = engines.fresh(**options, pooler_config=PoolerConfig(task="token_embed"))
    for prompt, actual in zip(prompts, vectors(tokens, prompts, "token_embed"), strict=True):
        expected = normalize(hidden_states(checkpoint, prompt), dim=-1)
        assert_close(actual, expected, f"{len(prompt)} tokens")
    mean = engines.fresh(**options, pooler_config=PoolerConfig(seq_pooling_type="MEAN"))
    for prompt, actual in zip(prompts, vectors(mean, prompts), strict=True):
        assert_close(actual, pooled(checkpoint, prompt, "MEAN"), f"{len(prompt)} tokens")


def test_a_decoder_made_to_look_ahead(engines: Engines) -> None:
    engine = engines.fresh(
        "qwen3",
        runner="pooling",
        convert="embed",
        hf_overrides={"is_causal": False},
        enable_chunked_prefill=True,
        rbln=WHOLE,
    )
    prompts = make_prompts([1, 16, 65, 200], seed=62)
    for prompt, actual in zip(prompts, vectors(engine, prompts), strict=True):
        rows = hidden_states(engine.checkpoint, prompt, sees_all=True)
        assert_close(actual, normalize(rows[-1], dim=-1), f"{len(prompt)} tokens")


def test_a_cross_encoder_tells_query_from_document(engines: Engines, tmp_path: Path) -> None:
    checkpoint = encoder("Bert", engines.checkpoints("llama"), tmp_path / "pairs", num_labels=1)
    engine = engines.fresh(checkpoint=checkpoint, enable_chunked_prefill=True, rbln=WHOLE)
    (prompt,) = make_prompts([40], seed=63)
    scores: list[float] = []
    for start in (None, 10, 39):
        params = {} if start is None else {"extra_kwargs": {"compressed_token_type_ids": start}}
        (actual,) = vectors(engine, [prompt], "classify", **params)
        expected = class_logits(checkpoint, prompt, document_start=start).sigmoid()
        assert_close(actual, expected, f"document from {start}")
        scores.append(float(actual))
    assert len(set(scores)) == 3
    assert TOKEN_TYPE_SHIFT == 30, "ids with their mark must fit into 32 bits"


def test_an_encoder_cannot_generate(engines: Engines) -> None:
    with pytest.raises(Exception, match="no attention layer with a KV cache"):
        engines.fresh("qwen3", hf_overrides={"is_causal": False})


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_encoder(engines: Engines, tmp_path: Path, dtype: str) -> None:
    checkpoint = encoder("Bert", engines.checkpoints("llama"), tmp_path / "half")
    engine = engines.fresh(checkpoint=checkpoint, dtype=dtype, enable_chunked_prefill=True)
    prompts = make_prompts([5, 70], seed=64)
    for prompt, actual in zip(prompts, vectors(engine, prompts), strict=True):
        assert torch.isfinite(actual).all()
        assert float(actual @ pooled(checkpoint, prompt, "CLS")) > 0.99
