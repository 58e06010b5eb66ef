"""The content of padded rows and unused cache slots reaches no token: all of it is NaN."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rbln_backend.core import UsefulRows
from rbln_backend.devices.emulated.compiler import EmulatedGraph
from tests.engine.conftest import Engines
from tests.engine.test_equality import make_prompts
from tests.engine.test_scheduling import greedy, tokens
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

PAD_TOKEN = 0


def poison_padding(checkpoint: Path, target: Path) -> Path:
    """A copy whose padding token embeds as NaN, so that padded rows are NaN in every layer."""
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][PAD_TOKEN] = float("nan")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    "arch", ["llama", "mistral", pytest.param("exaone4", marks=pytest.mark.wide)]
)
def test_nan_in_padding_changes_no_token(engines: Engines, arch: str, tmp_path: Path) -> None:
    poisoned = poison_padding(engines.checkpoints(arch), tmp_path / "model")
    engine = engines.fresh(arch, checkpoint=poisoned, max_num_seqs=4)
    for cache in engine.kv_caches():
        cache.fill_(float("nan"))
    # Prompts of 5 and 70 leave padded rows in their chunks, three requests one in the batch.
    prompts = make_prompts([5, 70, 130], seed=21)
    outputs = engine.generate(prompts, greedy(30))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_generate(engines.checkpoints(arch), prompt, 30)
        assert tokens([output]) == [expected.token_ids]
    assert any(torch.isnan(cache[0]).any() for cache in engine.kv_caches()), "the null block"


def test_a_chunk_that_ends_no_prompt_ends_with_its_last_keys(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[UsefulRows] = []
    run = EmulatedGraph.run

    def note(graph: EmulatedGraph, useful: UsefulRows | None = None) -> tuple[torch.Tensor, ...]:
        if useful is not None:
            runs.append(useful)
        return run(graph, useful)

    monkeypatch.setattr(EmulatedGraph, "run", note)
    # Two chunks of 64 and a rest, which needs their keys and values.
    (prompt,) = make_prompts([150], seed=23)
    output = engines("llama").generate([prompt], greedy(12))
    expected = reference_generate(engines.checkpoints("llama"), prompt, 12)
    assert tokens(output) == [expected.token_ids]
    assert runs == [(64, 0, False), (64, 0, False), (22, 1, False)]
    # Hidden states of every chunk are read.
    (prompt,) = make_prompts([150], seed=24)
    scored = greedy(1)
    scored.prompt_logprobs = 1
    engines("llama").generate([prompt], scored)
    assert runs[3:] == [(64, 0, True), (64, 0, True), (22, 1, True)]
