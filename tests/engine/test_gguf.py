"""GGUF files whose blocks stay packed give the tokens of transformers over the same blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from vllm import SamplingParams

from rbln_backend.gguf.checkpoint import write_checkpoint
from rbln_backend.parity.runners.plain_weights import plain_checkpoint
from tests.adapters import EVERY_LINEAR, HEAD, assert_worth_merged_weights, make_adapter, merge
from tests.checkpoints import CheckpointCache
from tests.engine.conftest import Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.test_equality import make_prompts
from tests.gguf_files import write_gguf
from tests.graph_cache import graph_cache
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
Kind = gguf.GGMLQuantizationType
WIDE = {"hidden_size": 256, "intermediate_size": 512}
FILES: dict[str, tuple[str, Kind, dict[str, Kind], dict[str, Any]]] = {
    # Parts of a layer that vLLM makes one differ, as in most files; the embedding is the head.
    "tied": (
        "llama",
        Kind.Q4_1,
        {"token_embd": Kind.Q8_0, "attn_v": Kind.Q5_1, "ffn_down": Kind.Q8_0},
        {"tie_word_embeddings": True},
    ),
    "q4_0": ("qwen2", Kind.Q4_0, {"attn_q": Kind.Q4_1, "output": Kind.Q5_0}, {}),
    # A table that vLLM wants plain, and parts that are one in the file.
    "gemma2": ("gemma2", Kind.Q8_0, {}, {}),
    "phi3": ("phi3", Kind.Q4_0, {"ffn_up": Kind.Q4_1}, {}),
    "k": (
        "llama",
        Kind.Q4_0,
        {
            "attn_v": Kind.Q6_K,
            "attn_q": Kind.Q4_K,
            "attn_k": Kind.Q4_K,
            "ffn_up": Kind.Q5_K,
            "token_embd": Kind.Q6_K,
        },
        WIDE,
    ),
}


def folder_of(name: str, checkpoints: CheckpointCache, place: Path) -> Path:
    arch, kind, others, fields = FILES[name]
    original = checkpoints(arch, **fields)
    folder = place / "checkpoint"
    folder.mkdir()
    file = write_gguf(original, place / "model.gguf", kind=kind, others=others)
    assert "kept packed" in write_checkpoint(file, folder)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.wide if x == "phi3" else ()) for x in FILES]
)
def test_packed_blocks_equal_transformers(
    name: str, engines: Engines, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    folder = folder_of(name, checkpoints, tmp_path)
    prompts = make_prompts([1, 17, 70], seed=3)
    with plain_checkpoint(str(folder), None) as plain:
        wanted = [
            reference_generate(Path(plain), prompt, NUM_TOKENS).token_ids for prompt in prompts
        ]
    engine = engines.fresh(checkpoint=folder, dtype="float32")
    outputs = engine.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted


@pytest.mark.wide
@pytest.mark.parametrize("name", ["q4_0", "k"])
def test_an_adapter_over_blocks_is_worth_its_merged_weights(
    name: str, engines: Engines, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    folder = folder_of(name, checkpoints, tmp_path)
    prompts = make_prompts([1, 17, 70], seed=4)
    with plain_checkpoint(str(folder), None) as plain:
        targets = (*EVERY_LINEAR, *HEAD)
        adapter = make_adapter(Path(plain), tmp_path / "adapter", seed=3, targets=targets)
        merged = merge(Path(plain), adapter, tmp_path / "merged")
    engine = engines.fresh(checkpoint=folder, dtype="float32", enable_lora=True, max_lora_rank=8)
    assert_worth_merged_weights(engine.llm, adapter, merged, prompts, GREEDY)


@pytest.mark.wide
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("name", ["tied", "k"])
def test_ranks_share_blocks(
    name: str,
    options: dict[str, Any],
    engines: Engines,
    checkpoints: CheckpointCache,
    tmp_path: Path,
) -> None:
    folder = folder_of(name, checkpoints, tmp_path)
    engine = engines.fresh(checkpoint=folder, dtype="float32")
    prompts = make_prompts([1, 17, 70], seed=5)
    answers = run_ranks(folder, graph_cache(), prompts, dtype="float32", **options)
    assert_as_one_rank(engine, prompts, answers, 1e-4)
