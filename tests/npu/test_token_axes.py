"""Models whose classes take rows of tokens, over the double, whose rule ``axes`` refuses rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from rbln_backend.models.token_axes import keep_axes
from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, THREE_CHUNKS, Job, Ran, run
from tests.npu.test_engines import LONG

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FAMILIES = (
    # Norms of heads see rows; a gate and experts.
    "glm4_moe",
    # vLLM's Transformers backend, which makes one sequence of all requests.
    "olmo2",
)
OTHERS = (
    *("cohere", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone4", "falcon_new", "gemma3_text"),
    *("glm4", "gpt2", "gptj", "gpt_neox", "granitemoe", "helium", "mixtral", "nemotron", "opt"),
    *("persimmon", "phi3", "qwen2_moe", "qwen3", "stablelm"),
)


def jobs_of(names: tuple[str, ...], checkpoints: CheckpointCache) -> list[Job]:
    """Requests of several lengths together, so that batches have more than one row."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return [
        Job(
            checkpoints(name, **LONG, **(latent if name.startswith("deepseek") else {})),
            batches=[[ONE_CHUNK, THREE_CHUNKS]],
            max_tokens=4,
        )
        for name in names
    ]


@pytest.mark.parametrize(
    "names", [FAMILIES, pytest.param(OTHERS, marks=pytest.mark.wide)], ids=["two", "others"]
)
def test_answers_are_those_of_transformers(
    names: tuple[str, ...], checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    jobs = jobs_of(names, checkpoints)
    ran: Ran = run(jobs, tmp_path)
    assert dict(zip(names, ran.answers, strict=True)) == {
        name: job.expected() for name, job in zip(names, jobs, strict=True)
    }
    assert ran.calls("broken") == []


def test_a_layer_that_splits_rows_is_refused(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"self_attn: attention that splits rows of tokens"):
        run(jobs_of(("minicpm3",), checkpoints), tmp_path)


@pytest.mark.parametrize("rotated", [16, 8], ids=["all", "part"])
@pytest.mark.parametrize("is_halved", [True, False], ids=["halves", "pairs"])
def test_heads_are_turned_as_by_vllm(*, is_halved: bool, rotated: int) -> None:
    with set_current_vllm_config(VllmConfig()):
        layer = RotaryEmbedding(16, rotated, 64, 10000.0, is_halved, torch.float32)
    positions, q, k = torch.randint(64, (2, 3)), torch.randn(2, 3, 4 * 16), torch.randn(2, 3, 16)
    rows = (x.flatten(0, 1) for x in (q, k))
    expected = layer.forward_native(positions.flatten(), *rows)
    keep_axes(nn.ModuleList([layer]))
    for found, wanted in zip(layer(positions, q, k), expected, strict=True):
        assert torch.equal(found.flatten(0, 1), wanted)
    # As the vendor's: a cosine and a sine for each number of a head.
    assert layer.cos_cache.shape == layer.sin_cache.shape == (64, rotated)
