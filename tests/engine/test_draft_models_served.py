"""Draft models of quantised models and of models with windows, and their graphs in a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.commands.cli import main
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import fitted_medusa, random_eagle
from tests.engine.conftest import Engines
from tests.engine.support import MOST, AnyLength, make_prompts
from tests.engine.test_draft_models import Drafted, speculation_of
from tests.engine.test_speculation import greedy, results, seeded
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

pytestmark = pytest.mark.engine

PROMPTS = make_prompts([17, 63, 130, 5], seed=61)
PARAMS = [greedy(max_tokens=40), seeded(2, max_tokens=40), greedy(max_tokens=40), greedy()]
RECIPES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "fp8": (
        Recipe(format="fp8", block=(128, 128)),
        {"hidden_size": 192, "num_key_value_heads": 4},
    ),
    "w4a16": (Recipe(bits=4, group_size=64, head_bits=8), {}),
}


def served_model(name: str, checkpoints: CheckpointCache, folder: Path) -> tuple[Path, Path]:
    """Return a checkpoint, and one of the same values that transformers reads."""
    if name == "windows":
        plain = checkpoints("gemma3_text")
        return plain, plain
    recipe, fields = RECIPES[name]
    made = make_quantized_checkpoint("llama", folder / "checkpoint", recipe, **fields)
    return made, made / "plain"


@pytest.mark.parametrize(
    "name",
    ["fp8", "windows", pytest.param("w4a16", marks=pytest.mark.wide)],
)
def test_heads_of_a_model_change_no_token(
    engines: Engines, checkpoints: CheckpointCache, tmp_path: Path, name: str
) -> None:
    checkpoint, readable = served_model(name, checkpoints, tmp_path)
    plain = engines.fresh(checkpoint=checkpoint)
    answers = results(plain, PROMPTS, PARAMS)
    texts = [prompt + list(answer[0]) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    heads = fitted_medusa(tmp_path / "heads", readable, texts, last=41)
    own = engines.fresh(
        checkpoint=checkpoint,
        speculative_config=speculation_of("medusa", heads),
        disable_log_stats=False,
    )
    drafted = Drafted(plain, own)
    drafted.check(AnyLength(MOST + 1))
    # Twice, with prefix hits.
    for _ in range(2):
        drafted.run(PROMPTS, PARAMS)
    assert drafted.share() > 0.5


def test_a_bundle_carries_the_graphs_of_a_draft_model(
    engines: Engines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layer = random_eagle(tmp_path / "layer", engines.checkpoints("llama"))
    options: dict[str, Any] = {
        "speculative_config": speculation_of("eagle", layer),
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
    }
    first = engines.fresh("llama", rbln={"cache_root": str(tmp_path / "one")}, **options)
    made = first.total("rbln_compile_seconds_count", result="compiled")
    bundle, root = str(tmp_path / "bundle.tar"), str(tmp_path / "two")
    assert (
        main(["cache", "export", bundle, "--cache-root", str(tmp_path / "one"), "--no-kernels"])
        == 0
    )
    assert main(["cache", "import", bundle, "--cache-root", root]) == 0
    assert f"{made:.0f} graphs imported into {root}" in capfd.readouterr().out
    second = engines.fresh("llama", rbln={"cache_root": root}, **options)
    assert second.total("rbln_compile_seconds_count", result="compiled") == 0
    # A layer's chunks and steps, and its single tokens.
    for kind, count in (("draft", 4), ("draft_prefill", 2)):
        loaded = second.total("rbln_compile_seconds_count", result="loaded", kind=kind)
        assert loaded == count
    assert results(second, PROMPTS[:2], PARAMS[:2]) == results(first, PROMPTS[:2], PARAMS[:2])
