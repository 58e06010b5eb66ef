"""Draft models change no token: fitted heads, which are often right, and random ones."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.worker.check import survey_store
from rbln_backend.worker.precompile import compile_model
from server.commands.cli import main
from tests.checkpoint_tokenizer import VOCAB_SIZE
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import (
    FITTED,
    NARROW,
    RANDOM,
    Eagle3Reference,
    EagleReference,
    fitted_medusa,
    random_eagle,
    random_medusa,
)
from tests.engine.conftest import DEFAULTS, Engine, Engines
from tests.engine.support import FEW, FEWER, MOST, AnyLength, Seldom, make_prompts
from tests.engine.test_speculation import OFF, WAYS, Crowd, assert_same, greedy, results, seeded
from tests.kernel_cache import share_kernels
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

pytestmark = pytest.mark.engine

PROMPTS = make_prompts([1, 17, 63, 130, 5, 200], seed=31)
GREEDY = [greedy(max_tokens=n) for n in (40, 33, 7, 40, 1, 40)]


@dataclass
class Drafted:
    """An engine without speculation, and one with a draft model."""

    plain: Engine
    own: Engine
    method: str = "medusa"
    logprobs: int | None = 1
    """Of some requests; None where they differ by rounding."""

    def check(self, lengths: AnyLength) -> None:
        """Check drafts at ``lengths``, whatever they gain."""
        self._drafting._budget = lengths

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        """Assert that both engines give the same, and that nothing is left of the requests."""
        expected = self.expected(prompts, params)
        assert_same(results(self.own, prompts, params), expected)
        self.assert_idle()

    def expected(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        return results(self.plain, prompts, params)

    def assert_idle(self) -> None:
        """Assert that the engine holds nothing of any request, and has compiled nothing late."""
        self.own.generate([[7]], SamplingParams(max_tokens=1))
        assert max(self.remembered()) <= 1
        assert self.own.used_blocks() == 0
        assert self.own.total("rbln_recompiles_after_warmup_total") == 0

    def remembered(self) -> list[int]:
        """Return how many requests have drafts, and what the draft model's graphs need of them."""
        return [len(self.model._drafts), len(getattr(self.model._source, "_unread", ()))]

    def assert_fewer_steps(self, least_share: float) -> None:
        """Assert equal greedy answers, in fewer steps, with more than that share accepted."""
        self.check(AnyLength(MOST + 1))
        self.run(PROMPTS, GREEDY)
        assert self.share() > least_share
        # One after the other: a prefill, and without drafts 39 decode steps.
        before = self.steps()
        self.run(PROMPTS[3:4], GREEDY[3:4])
        assert self.steps() - before < 36

    def assert_same_after_preemption_and_hits(self) -> None:
        """Run twice the same prompts; the last answer ends with the context."""
        self.check(AnyLength())
        prompts = [*make_prompts([100, 101, 102, 103], seed=41), *make_prompts([250], seed=46)]
        for _ in range(2):
            self.run(prompts, [*self._ways(), greedy()])
        counted = {metric.name: metric for metric in self.own.llm.get_metrics()}
        assert counted["vllm:num_preemptions"].value > 0
        assert counted["vllm:prefix_cache_hits"].value > 0

    def assert_same_with_aborts(self, rng: random.Random) -> None:
        """Run requests that come, and of which some are aborted."""
        params = self._ways() * 2
        prompts = make_prompts([1, 90, 33, 100, 64, 7, 110, 48], seed=45)
        crowd, expected = Crowd(self.own), self.expected(prompts, params)
        self.check(AnyLength(rng=rng))
        crowd.play(prompts, params, rng)
        crowd.assert_got(expected)
        self.assert_idle()

    def _ways(self) -> list[SamplingParams]:
        last = greedy(logprobs=self.logprobs)
        return [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), last]

    def share(self) -> float:
        accepted = self.own.total("rbln_draft_accepted_tokens_total")
        return accepted / self.own.total("rbln_draft_tokens_total")

    def steps(self) -> float:
        phases = ("decode", "verify")
        return sum(self.own.total("rbln_bucket_steps_total", phase=phase) for phase in phases)

    @property
    def speculation(self) -> Any:
        return self.own.core.vllm_config.speculative_config

    @property
    def model(self) -> Any:
        return self._drafting._model

    @property
    def _drafting(self) -> Any:
        return self.own.core.model_executor.driver_worker.worker._runner._drafting


def texts_of(
    plain: Engine, prompts: list[list[int]] = PROMPTS, params: list[SamplingParams] = GREEDY
) -> list[list[int]]:
    answers = results(plain, prompts, params)
    return [prompt + list(answer[0]) for prompt, answer in zip(prompts, answers, strict=True)]


REFERENCES: dict[str, Any] = {"eagle": EagleReference, "eagle3": Eagle3Reference}


# EAGLE's layer is read as EAGLE-3's, which needs more; tests below are of EAGLE's alone.
@pytest.fixture(
    scope="module", params=["medusa", "eagle3", pytest.param("eagle", marks=pytest.mark.wide)]
)
def drafted(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Drafted:
    plain, method = engines("llama"), request.param
    folder = tmp_path_factory.mktemp(method)
    own = FITTED[method](folder, plain.checkpoint, texts_of(plain), last=41)
    return Drafted(plain, start(engines, own, method), method)


def speculation_of(method: str, own: Path) -> dict[str, Any]:
    return {"method": method, "model": str(own), "num_speculative_tokens": MOST}


def start(
    engines: Engines, own: Path, method: str = "medusa", *, arch: str = "llama", **options: Any
) -> Engine:
    """With too few blocks for four long requests."""
    speculation = speculation_of(method, own)
    options = {"rbln": FEW, "num_gpu_blocks_override": 34, "disable_log_stats": False} | options
    return engines.fresh(arch, speculative_config=speculation, **options)


def test_greedy_answers_are_the_same_in_fewer_steps(drafted: Drafted) -> None:
    drafted.assert_fewer_steps(0.6)


def test_every_way_of_sampling_gives_the_same(drafted: Drafted) -> None:
    drafted.check(AnyLength())
    params = [greedy(**way) for way in WAYS] + [seeded(n, **way) for n, way in enumerate(WAYS)]
    drafted.run(make_prompts([5 + 4 * n for n in range(len(params))], seed=33), params)


def test_grammars_predictions_and_requests_without_drafts(drafted: Drafted) -> None:
    drafted.check(AnyLength(MOST + 1))
    rules = StructuredOutputsParams(regex=r"([a-z]{1,4} ){3,30}")
    (answer,) = results(drafted.plain, PROMPTS[1:2], GREEDY[1:2])
    params = [
        seeded(3, structured_outputs=rules, ignore_eos=False),
        greedy(max_tokens=33, extra_args={"speculation": {"prediction": answer[0]}}),
        greedy(extra_args=OFF),
        seeded(4),
    ]
    drafted.run([PROMPTS[2], PROMPTS[1], PROMPTS[3], PROMPTS[5]], params)


def test_preemption_prefix_hits_and_the_end_of_the_context(drafted: Drafted) -> None:
    drafted.assert_same_after_preemption_and_hits()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 12))]
)
def test_requests_that_come_and_are_aborted(drafted: Drafted, seed: int) -> None:
    drafted.assert_same_with_aborts(random.Random(seed))


def test_the_description_names_the_draft_model(drafted: Drafted) -> None:
    described = json.loads((drafted.own.run_dir / "describe-0.json").read_text())
    own = described["draft_model"]
    assert (own["method"], own["drafts"]) == (drafted.method, MOST)
    plain = json.loads((drafted.plain.run_dir / "describe-0.json").read_text())
    weights = described["model"]["weight_bytes"] - plain["model"]["weight_bytes"]
    # EAGLE's LM head and embedding are the served model's, EAGLE-3's embedding.
    shared = {"eagle": 2, "eagle3": 1}.get(drafted.method, 0) * 4 * VOCAB_SIZE * 128
    assert own["weight_bytes"] - shared == weights > 0


def test_counts_of_vllm_agree(drafted: Drafted) -> None:
    drafted.run(PROMPTS, GREEDY)
    theirs = {metric.name: metric for metric in drafted.own.llm.get_metrics()}
    ours = {"draft_tokens": "rbln_draft_tokens", "accepted_tokens": "rbln_draft_accepted_tokens"}
    for name, own in ours.items():
        counted = theirs[f"vllm:spec_decode_num_{name}"].value
        assert counted == drafted.own.total(f"{own}_total") > 0
    places = theirs["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert sum(places) == theirs["vllm:spec_decode_num_accepted_tokens"].value
    assert places == sorted(places, reverse=True)


def test_wrong_drafts_cost_steps_no_tokens(
    engines: Engines, drafted: Drafted, tmp_path: Path
) -> None:
    own = RANDOM[drafted.method](tmp_path, drafted.plain.checkpoint)
    wrong = Drafted(drafted.plain, start(engines, own, drafted.method))
    wrong.check(AnyLength(MOST + 1))
    wrong.run(PROMPTS, [*GREEDY[:3], seeded(1), *GREEDY[4:]])
    assert wrong.share() < 0.1
    # Graphs of a start like it: weights are no part of them.
    assert wrong.own.total("rbln_compile_seconds_count", result="compiled") == 0


NORMS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("eagle", {}),
        ("eagle3", {}),
        ("eagle3", NARROW | NORMS),
        pytest.param("eagle3", NORMS, marks=pytest.mark.wide),
        pytest.param("eagle3", NARROW, marks=pytest.mark.wide),
    ],
    ids=["eagle", "eagle3", "eagle3-both", "eagle3-norms", "eagle3-narrow"],
)
def test_drafts_are_those_of_the_whole_text(
    engines: Engines, tmp_path: Path, method: str, fields: dict[str, Any]
) -> None:
    """With a strong attention: after chunks, after drafts that were wrong, and after hits."""
    plain = engines("llama")
    own = RANDOM[method](tmp_path, plain.checkpoint, **fields)
    # Graphs of the fixture's engine, or few.
    drafted = Drafted(plain, start(engines, own, method, rbln=FEWER if fields else FEW))
    drafted.check(AnyLength())
    reference = REFERENCES[method](plain.checkpoint, own)
    seen = record_drafts(drafted)
    prompts, params = make_prompts([130, 70, 9], seed=47), [greedy(max_tokens=12)] * 3
    for _ in range(2):
        drafted.run(prompts, params)
    assert len(seen) > 30
    for text, drafts in random.Random(8).sample(seen, 12) + seen[:3] + seen[-3:]:
        assert drafts == reference.drafts(text, MOST)
    # After pauses, of which the layer has read each token.
    drafted.check(Seldom())
    seen.clear()
    drafted.run(make_prompts([100, 40], seed=48), [greedy(max_tokens=90)] * 2)
    assert 12 < len(seen) < 30
    assert all(drafts == reference.drafts(text, MOST) for text, drafts in seen[1::2])


def record_drafts(drafted: Drafted) -> list[tuple[list[int], list[int]]]:
    """Return a list that gets each text and its drafts, as steps make them."""
    seen = list[tuple[list[int], list[int]]]()
    source = drafted.model._source

    class Recorded:
        follow, forget = source.follow, source.forget

        def __call__(self, step: Any, rows: Any) -> Any:
            drafts, states = source(step, rows), [step.states[row] for row in rows]
            texts = [[*state.prompt_token_ids, *state.output_token_ids] for state in states]
            pairs = zip(texts, drafts, strict=True)
            seen.extend((text, own) for text, own in pairs if len(text) > 1)
            return drafts

    drafted.model._source = Recorded()
    return seen


def test_a_checkpoint_with_fewer_heads_is_refused(engines: Engines, tmp_path: Path) -> None:
    heads = random_medusa(tmp_path, engines.checkpoints("llama"), heads=MOST - 1)
    with pytest.raises(
        UnsupportedModelError, match=r"num_speculative_tokens 3: .*(blocks|lm_heads)\.2"
    ):
        start(engines, heads)


# ------------------------------------------------------------------------------ draft models served
SERVED_PROMPTS = make_prompts([17, 63, 130, 5], seed=61)
PARAMS = [greedy(max_tokens=40), seeded(2, max_tokens=40), greedy(max_tokens=40), greedy()]
RECIPES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "fp8": (Recipe(format="fp8", block=(128, 128)), {"hidden_size": 192, "num_key_value_heads": 4}),
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
    "name", ["fp8", *(pytest.param(name, marks=pytest.mark.wide) for name in ("windows", "w4a16"))]
)
def test_heads_of_a_model_change_no_token(
    engines: Engines, checkpoints: CheckpointCache, tmp_path: Path, name: str
) -> None:
    checkpoint, readable = served_model(name, checkpoints, tmp_path)
    plain = engines.fresh(checkpoint=checkpoint, rbln=FEW)
    texts = texts_of(plain, SERVED_PROMPTS, PARAMS)
    heads = fitted_medusa(tmp_path / "heads", readable, texts, last=41)
    own = engines.fresh(
        checkpoint=checkpoint,
        rbln=FEWER,
        speculative_config=speculation_of("medusa", heads),
        disable_log_stats=False,
    )
    drafted = Drafted(plain, own)
    drafted.check(AnyLength(MOST + 1))
    # Twice, with prefix hits.
    for _ in range(2):
        drafted.run(SERVED_PROMPTS, PARAMS)
    assert drafted.share() > 0.5


@pytest.mark.wide
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
    assert results(second, SERVED_PROMPTS[:2], PARAMS[:2]) == results(
        first, SERVED_PROMPTS[:2], PARAMS[:2]
    )


# --------------------------------------------------------------------------------- draft embeddings
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


def assert_right(engine: Engine, method: str, own: Path) -> None:
    """Assert that the engine drafts as the layer in ``own`` does in plain PyTorch."""
    drafted = Drafted(engine, engine, method)
    drafted.check(AnyLength())
    seen = record_drafts(drafted)
    drafted.own.generate(make_prompts([70, 9], seed=47), greedy(max_tokens=12))
    reference = REFERENCES[method](engine.checkpoint, own)
    assert len(seen) > 10
    for text, drafts in seen[:8]:
        assert drafts == reference.drafts(text, MOST)


@pytest.mark.parametrize(
    ("method", "layers"), [("eagle", 1), pytest.param("eagle3", 3, marks=pytest.mark.wide)]
)
def test_only_layers_that_share_the_embedding_share_graphs(
    engines: Engines, tmp_path: Path, method: str, layers: int
) -> None:
    served = engines.checkpoints("llama", num_hidden_layers=layers)
    table, layer = embedding_of(served), RANDOM[method](tmp_path / "layer", served)
    others = torch.randn(table.shape, generator=torch.Generator().manual_seed(8))
    own = with_embedding(layer, tmp_path / "own", others)
    same = with_embedding(layer, tmp_path / "same", table.clone())
    root = tmp_path / "cache"
    share_kernels(root)
    first, second, third = (
        start(engines, folder, method, checkpoint=served, rbln=FEWER | {"cache_root": str(root)})
        for folder in (layer, own, same)
    )
    assert_right(second, method, own)
    assert second.total("rbln_compile_seconds_count", result="compiled") > 0
    assert_right(third, method, layer)
    assert third.total("rbln_compile_seconds_count", result="compiled") == 0
    assert weight_bytes(third) == weight_bytes(first) < weight_bytes(second)


def test_compile_and_check_read_the_checkpoint(engines: Engines, tmp_path: Path) -> None:
    """They load no weights; the layer is in a file of torch, as EAGLE's are often published."""
    served = engines.checkpoints("llama", num_hidden_layers=1)
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
    engine = start(
        engines, stored, "eagle", checkpoint=served, rbln=FEWER | {"cache_root": str(root)}
    )
    assert engine.total("rbln_compile_seconds_count", result="compiled") == 0
    assert_right(engine, "eagle", own)
