"""Draft models of engines with several ranks change no token of one rank."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.draft_checkpoints import FITTED
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.script import run_script
from tests.engine.support import FEW, MOST
from tests.engine.test_draft_families import BLOCKS, CHANNELS, MTP, SIZES, TENSORS
from tests.engine.test_draft_models import PROMPTS, REFERENCES, speculation_of, texts_of
from tests.engine.test_speculation import NGRAM
from tests.graph_cache import graph_cache
from tests.mtp_checkpoints import MTP_LAYERS, MtpMaker, quantized_maker
from tests.quantized_checkpoints import Recipe

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("draft_ranks_script.py")
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
OFTEN = "eagle3"
WHOLE_EXPERTS = {"enable_expert_parallel": True}


def assert_same_tokens(
    served: Path,
    drafted: Path,
    speculation: dict[str, Any],
    folder: Path,
    ranks: dict[str, Any] | None = None,
    *,
    least_share: float,
    **options: Any,
) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
        "VLLM_PLUGINS": "rbln",
        "VLLM_CACHE_ROOT": str(graph_cache()),
    }
    ranks = (ranks or TENSOR) | options
    argument = [str(served), str(drafted), speculation, ranks, str(folder), least_share]
    seen = run_script(SCRIPT, argument, environment, timeout_s=280)
    if seen:
        reference = REFERENCES[speculation["method"]](served, Path(speculation["model"]))
        assert [reference.drafts(text, MOST) for text, _ in seen] == [own for _, own in seen]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.wide] * (name != OFTEN)) for name in FITTED]
)
def test_two_tensor_parallel_ranks(engines: Engines, tmp_path: Path, method: str) -> None:
    plain = engines("llama")
    own = FITTED[method](tmp_path / "own", plain.checkpoint, texts_of(plain), last=41)
    served, speculation = plain.checkpoint, speculation_of(method, own)
    assert_same_tokens(served, served, speculation, tmp_path, least_share=0.6)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in MTP_LAYERS),
        # vLLM refuses the option for a model without experts.
        *((family, WHOLE_EXPERTS) for family in MTP_LAYERS if family != "mimo"),
    ],
    ids=lambda value: value if isinstance(value, str) else ("whole" if value else "split"),
)
def test_two_tensor_parallel_ranks_with_mtp(
    engines: Engines, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    maker = MtpMaker(family, engines.checkpoints)
    plain = engines(maker.family.served)
    own = maker.fitted(tmp_path / "own", texts_of(plain), last=41)
    assert_same_tokens(plain.checkpoint, own, MTP, tmp_path, least_share=0.5, **options)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "recipe"),
    [("deepseek_v3", TENSORS), ("glm4_moe", BLOCKS), ("glm4_moe", CHANNELS)],
    ids=["tensors", "blocks", "channels"],
)
def test_two_tensor_parallel_ranks_with_quantized_mtp(
    engines: Engines, tmp_path: Path, family: str, recipe: Recipe
) -> None:
    # Each rank has whole blocks of 64.
    sizes = SIZES[family] | {"moe_intermediate_size": 128}
    if family == "glm4_moe":
        sizes["head_dim"] = 64
    maker = quantized_maker(family, tmp_path / "served", recipe, **sizes)
    plain = engines.fresh(checkpoint=maker.stored)
    own = maker.fitted(tmp_path / "own", texts_of(plain), last=41)
    assert_same_tokens(plain.checkpoint, own, MTP, tmp_path, least_share=0.5)


@pytest.mark.wide
def test_each_of_two_engines_has_a_draft_model(engines: Engines, tmp_path: Path) -> None:
    plain = engines("llama")
    own = FITTED[OFTEN](tmp_path / "own", plain.checkpoint, texts_of(plain), last=41)
    (run_dir := tmp_path / "run").mkdir()
    answers = run_ranks(
        plain.checkpoint,
        graph_cache(),
        PROMPTS,
        checks_all_drafts=True,
        data_parallel_size=2,
        speculative_config=speculation_of(OFTEN, own),
        additional_config={"rbln": FEW | {"num_threads": 1, "run_dir": str(run_dir)}},
    )
    assert_as_one_rank(plain, PROMPTS, answers, 0.0)
    drafted = Engine(None, run_dir, plain.checkpoint)
    checked = drafted.total("rbln_draft_tokens_total")
    assert drafted.total("rbln_draft_accepted_tokens_total") > 0.3 * checked > 0


# ------------------------------------------------------------------------------------- draft stages
# Each stage has steps of up to 4 requests.
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "max_num_seqs": 8}


OFTEN_IN_STAGES = ("eagle3", "llama")
FAMILIES = ("minimax_m2", "mistral_full", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")
SELDOM = [("medusa", "llama"), ("eagle", "llama"), *(("eagle3", arch) for arch in FAMILIES)]


@pytest.mark.parametrize(
    ("method", "arch"),
    [OFTEN_IN_STAGES, *(pytest.param(*case, marks=pytest.mark.wide) for case in SELDOM)],
)
def test_two_stages(engines: Engines, tmp_path: Path, method: str, arch: str) -> None:
    plain = engines(arch)
    own = FITTED[method](tmp_path / "own", plain.checkpoint, texts_of(plain), last=41)
    served, speculation = plain.checkpoint, speculation_of(method, own)
    assert_same_tokens(served, served, speculation, tmp_path, STAGES, least_share=0.6)


@pytest.mark.wide
def test_two_stages_of_two_ranks(engines: Engines, tmp_path: Path) -> None:
    """Each rank of the last stage gets its part of the embedding from the first stage."""
    plain = engines("llama")
    own = FITTED["eagle3"](tmp_path / "own", plain.checkpoint, texts_of(plain), last=41)
    served, speculation = plain.checkpoint, speculation_of("eagle3", own)
    ranks = STAGES | TENSOR
    assert_same_tokens(served, served, speculation, tmp_path, ranks, least_share=0.6)


@pytest.mark.wide
@pytest.mark.parametrize("family", [name for name in MTP_LAYERS if name != "ernie4_5_moe"])
def test_two_stages_with_mtp(engines: Engines, tmp_path: Path, family: str) -> None:
    # vLLM wants experts in each stage of GLM.
    fields = {"first_k_dense_replace": 0} if family == "glm4_moe" else {}
    maker = MtpMaker(family, engines.checkpoints, **fields)
    plain = engines.fresh(checkpoint=maker.stored)
    own = maker.fitted(tmp_path / "own", texts_of(plain), last=41)
    assert_same_tokens(plain.checkpoint, own, MTP, tmp_path, STAGES, least_share=0.5)


def test_stages_of_ernie_are_refused(engines: Engines, tmp_path: Path) -> None:
    maker = MtpMaker("ernie4_5_moe", engines.checkpoints)
    with pytest.raises(ValueError, match=r"method 'mtp' of ErnieMTPModel: speculative decoding of"):
        engines.fresh(checkpoint=maker.random(tmp_path), speculative_config=MTP, **STAGES)


@pytest.mark.wide
def test_two_stages_without_a_draft_model(engines: Engines, tmp_path: Path) -> None:
    served = engines("llama").checkpoint
    assert_same_tokens(served, served, NGRAM, tmp_path, STAGES, least_share=0.4)
