"""Layers of EAGLE with an embedding of their own, and with the served model's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.worker.check import survey_store
from rbln_backend.worker.precompile import compile_model
from tests.engine.conftest import DEFAULTS, Engine, Engines
from tests.engine.support import MOST, AnyLength, make_prompts
from tests.engine.test_draft_models import (
    REFERENCES,
    Drafted,
    record_drafts,
    speculation_of,
    start,
)
from tests.engine.test_eagle3_families import FEWER
from tests.engine.test_speculation import greedy
from tests.fitted_drafts import RANDOM
from tests.kernel_cache import share_kernels

pytestmark = pytest.mark.engine


def with_embedding(layer: Path, folder: Path, table: Tensor, *, archive: bool = False) -> Path:
    """Write a copy of ``layer`` with the embedding ``table`` [V, H], in a file of torch or not."""
    shutil.copytree(layer, folder)
    weights = load_file(layer / "model.safetensors") | {"embed_tokens.weight": table}
    save_file(weights, folder / "model.safetensors")
    if archive:
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return folder


def weight_bytes(engine: Engine) -> int:
    described = json.loads((engine.run_dir / "describe-0.json").read_text())
    return int(described["model"]["weight_bytes"])


def embedding_of(served: Path) -> Tensor:
    return load_file(served / "model.safetensors")["model.embed_tokens.weight"]


def assert_right(engines: Engines, engine: Engine, method: str, own: Path) -> None:
    """Assert that the engine drafts as the layer in ``own`` does in plain PyTorch."""
    drafted = Drafted(engines("llama"), engine, method)
    drafted.check(AnyLength())
    seen = record_drafts(drafted)
    drafted.own.generate(make_prompts([70, 9], seed=47), greedy(max_tokens=12))
    reference = REFERENCES[method](engines.checkpoints("llama"), own)
    assert len(seen) > 10
    for text, drafts in seen[:8]:
        assert drafts == reference.drafts(text, MOST)


@pytest.mark.parametrize("method", ["eagle", pytest.param("eagle3", marks=pytest.mark.wide)])
def test_only_layers_that_share_the_embedding_share_graphs(
    engines: Engines, tmp_path: Path, method: str
) -> None:
    served = engines.checkpoints("llama")
    table, layer = embedding_of(served), RANDOM[method](tmp_path / "layer", served)
    others = torch.randn(table.shape, generator=torch.Generator().manual_seed(8))
    own = with_embedding(layer, tmp_path / "own", others)
    same = with_embedding(layer, tmp_path / "same", table.clone())
    root = tmp_path / "cache"
    share_kernels(root)
    first, second, third = (
        start(engines, folder, method, rbln=FEWER | {"cache_root": str(root)})
        for folder in (layer, own, same)
    )
    assert_right(engines, second, method, own)
    assert second.total("rbln_compile_seconds_count", result="compiled") > 0
    assert_right(engines, third, method, layer)
    assert third.total("rbln_compile_seconds_count", result="compiled") == 0
    assert weight_bytes(third) == weight_bytes(first) < weight_bytes(second)


def test_compile_and_check_read_the_checkpoint(engines: Engines, tmp_path: Path) -> None:
    """They load no weights; the layer is in a file of torch, as EAGLE's are often published."""
    served = engines.checkpoints("llama")
    layer, table = RANDOM["eagle"](tmp_path / "layer", served), embedding_of(served)
    own = with_embedding(layer, tmp_path / "own", table.flip(0).contiguous())
    stored = with_embedding(layer, tmp_path / "stored", table.flip(0).contiguous(), archive=True)
    root = tmp_path / "cache"
    share_kernels(root)
    config = EngineArgs(
        str(served),
        speculative_config=speculation_of("eagle", stored),
        additional_config={"rbln": FEWER | {"cache_root": str(root), "num_threads": 1}},
        **DEFAULTS,
    ).create_engine_config()
    compile_model(config, [])
    assert {graph.state for graph in survey_store(config, str(root)).graphs} == {"stored"}
    engine = start(engines, stored, "eagle", rbln=FEWER | {"cache_root": str(root)})
    assert engine.total("rbln_compile_seconds_count", result="compiled") == 0
    assert_right(engines, engine, "eagle", own)
