"""LoRA adapters over the double, as inputs of the graphs that it compiled before they were loaded.

Weights and adapters are tensors of torch's device ``rbln``; see ``test_device_tensors.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.devices import port
from rbln_backend.worker.check import inspect_model
from rbln_backend.worker.preflight import planned_graphs
from tests.adapters import ATTENTION, EVERY_LINEAR, MLP, make_adapter, merge
from tests.checkpoints import CheckpointCache
from tests.engine.support import make_prompts
from tests.npu.engines import ONE_CHUNK, OPTIONS, SHARED, THREE_CHUNKS, TWO_BLOCKS, Job, Ran, run
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.reference import reference_generate
from tests.server.real_server import RealServer
from tests.vendor.environment import torch_rbln_variables

pytestmark = pytest.mark.timeout(1800)

LONG: dict[str, Any] = {"max_position_embeddings": 4096}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 32}
NUM_TOKENS = 12
Batches = Sequence[Sequence[tuple[list[int], str]]]
"""Prompts with the name of an adapter each, "" for none."""


class Loras:
    """Three adapters of a checkpoint, and the answers of transformers with each merged in."""

    def __init__(self, checkpoint: Path, folder: Path, plain: Path | None = None) -> None:
        """``plain``: of the values of a quantised checkpoint."""
        self.checkpoint, self._plain = checkpoint, plain or checkpoint
        ranks = {"a": (32, EVERY_LINEAR), "b": (4, ATTENTION[1:3]), "c": (8, MLP)}
        self.paths = {
            name: make_adapter(self._plain, folder / name, rank=rank, targets=targets, seed=number)
            for number, (name, (rank, targets)) in enumerate(ranks.items())
        }
        self._merged = {
            path: merge(self._plain, path, folder / f"merged-{name}")
            for name, path in self.paths.items()
        }

    def job(self, batches: Batches, *, coming: str = "", **options: Any) -> Job:
        """Requests with an adapter each, "" for none."""
        return Job(
            self.checkpoint,
            LORA | options,
            [[prompt for prompt, _ in batch] for batch in batches],
            NUM_TOKENS,
            adapters=[[self.paths.get(name) for _, name in batch] for batch in batches],
            coming_adapter=self.paths.get(coming),
        )

    def expected(self, job: Job) -> list[list[list[int]]]:
        return [
            [self.answer(*pair) for pair in zip(batch, own, strict=True)]
            for batch, own in zip(job.batches, job.adapters, strict=True)
        ]

    def answer(self, prompt: list[int], adapter: Path | None) -> list[int]:
        path = self._plain if adapter is None else self._merged[adapter]
        return reference_generate(path, prompt, NUM_TOKENS).token_ids


MIXED: Batches = [
    [(ONE_CHUNK, "a")],
    # The scheduler's order is not that of the rows, the longest first.
    [(ONE_CHUNK, ""), (THREE_CHUNKS, "a"), (TWO_BLOCKS, "b"), (THREE_CHUNKS, "c")],
    # Begins as a prompt of another adapter did, and as one of its own.
    [(SHARED, "a"), (SHARED, "b")],
]
SHORT: Batches = [[(ONE_CHUNK, "a"), (THREE_CHUNKS, ""), (THREE_CHUNKS, "b"), (ONE_CHUNK, "c")]]
NAMES = ("a", "", "b", "c")
SIXTEEN: Batches = [
    [
        (prompt, NAMES[number % 4])
        for number, prompt in enumerate(make_prompts([40 + 9 * n for n in range(16)], seed=11))
    ]
]
# Of 4 requests at most: one prefill, three decodes, the head, and the test of slots.
GRAPHS = 6


def run_on_device(jobs: Sequence[Job], folder: Path, **double: Any) -> Ran:
    return run(jobs, folder, environment=torch_rbln_variables(), **double)


def assert_as_merged(loras: Sequence[Loras], jobs: Sequence[Job], ran: Ran) -> None:
    for own, job, answers in zip(loras, jobs, ran.answers, strict=True):
        assert answers == own.expected(job), job.checkpoint


@pytest.mark.engine
def test_answers_are_those_of_merged_weights(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    """In four slots and in one; the last engine has the graphs of the first."""
    loras = Loras(checkpoints("llama", **LONG), tmp_path)
    one = loras.job(SHORT, max_loras=1, max_cpu_loras=2)
    jobs = [loras.job(MIXED), one, loras.job(SHORT)]
    ran = run_on_device(jobs, tmp_path / "run")
    assert_as_merged([loras] * len(jobs), jobs, ran)
    compiles = ran.calls("compile")
    assert len(compiles) == GRAPHS * len(jobs), "loading compiles nothing"
    slots = [x for call in compiles for x in call["inputs"] if "lora" in x["name"]]
    assert {(x["kind"], x["device"]) for x in slots} == {("device", "rbln")}
    used = {name for call in compiles for name in call["ops"]}
    assert not {name for name in used if "gather" in name or "where" in name}
    assert all(call["hit"] for call in compiles[-GRAPHS:])


@pytest.mark.engine
def test_an_adapter_comes_and_goes_while_16_streams_run(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """Steps return before the device has ended them."""
    loras = Loras(checkpoints("llama", **LONG), tmp_path)
    options = {"max_num_seqs": 16, "async_scheduling": True}
    job = loras.job(SIXTEEN, coming="c", **options)
    ran = run_on_device([job], tmp_path / "run", hold=1)
    assert_as_merged([loras], [job], ran)
    assert len(ran.calls("compile")) == GRAPHS + 2, "of 8 and of 16 requests"


@pytest.mark.engine
@pytest.mark.wide
def test_families_and_quantised_bases(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    recipes = {"w4": Recipe(group_size=128), "fp8": Recipe(format="fp8", block=(32, 64))}
    quantised = [
        make_quantized_checkpoint("llama", tmp_path / name, recipe, **LONG)
        for name, recipe in recipes.items()
    ]
    windows = checkpoints("mistral", **LONG, sliding_window=300)
    loras = [
        Loras(checkpoints("qwen3", **LONG), tmp_path / "of-qwen3"),
        Loras(windows, tmp_path / "of-mistral"),
        *(Loras(path, tmp_path / f"of-{path.name}", path / "plain") for path in quantised),
    ]
    jobs = [own.job(MIXED if own.checkpoint == windows else SHORT) for own in loras]
    ran = run_on_device(jobs, tmp_path / "run")
    assert_as_merged(loras, jobs, ran)
    assert len(ran.calls("compile")) == GRAPHS * len(jobs)


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("ranks", ["tensor", "pipeline"])
def test_two_ranks(checkpoints: CheckpointCache, tmp_path: Path, ranks: str) -> None:
    loras = Loras(checkpoints("llama", **LONG), tmp_path)
    options: dict[str, Any] = {f"{ranks}_parallel_size": 2}
    job = loras.job(MIXED, **options)
    ran = run_on_device([job], tmp_path / "run", devices=4)
    assert_as_merged([loras], [job], ran)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("wrong", "double", "reason"),
    [
        (None, {"break": ["operands"]}, "SDK took a private copy of the slots"),
        # As parameters they are inputs without the marks of weights, which the SDK refuses.
        pytest.param("weights", {}, "rule 'marks'", marks=pytest.mark.wide),
    ],
)
def test_slots_that_the_sdk_keeps_copies_of_are_refused(
    checkpoints: CheckpointCache, tmp_path: Path, wrong: str | None, double: Any, reason: str
) -> None:
    loras = Loras(checkpoints("llama", **LONG), tmp_path)
    job = replace(loras.job(SHORT), wrong_adapters=wrong)
    with pytest.raises(AssertionError, match=reason):
        run_on_device([job], tmp_path / "run", **double)


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("wrong", ["mask", "slot"])
def test_what_is_done_wrong_is_seen(
    checkpoints: CheckpointCache, tmp_path: Path, wrong: str
) -> None:
    """Rows of a mask that are off by one, and slots that keep what they held.

    A small adapter follows a large one in the only slot.
    """
    loras = Loras(checkpoints("llama", **LONG), tmp_path)
    batches: Batches = [[(ONE_CHUNK, "a")], [(ONE_CHUNK, "b"), (THREE_CHUNKS, "")]]
    job = replace(loras.job(batches, max_loras=1), wrong_adapters=wrong)
    try:
        ran = run_on_device([job], tmp_path / "run")
    except AssertionError as error:
        assert "LoRA adapters under this SDK" in str(error)
    else:
        assert ran.answers[0] != loras.expected(job)


def configure(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, rbln: dict[str, Any] | None = None, **more: Any
) -> VllmConfig:
    """Make the configuration of an engine with torch-rbln, which this process does not load."""
    monkeypatch.setattr(port, "wants_npu_tensors", lambda config: config.use_device_tensor)
    settings = {"device": "rebel", "use_device_tensor": True} | (rbln or {})
    options = OPTIONS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} | more
    additional = {"rbln": settings}
    return EngineArgs(str(path), **options, additional_config=additional).create_engine_config()


@pytest.mark.usefixtures("sdk")
def test_slots_are_in_the_plan(
    checkpoints: CheckpointCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of linear layers alone, once for each of four chiplets."""
    config = configure(checkpoints("llama", **LONG), monkeypatch)
    assert "adapters-8" in map(str, planned_graphs(config))
    # The stored graphs are not compared, which needs the device.
    config.model_config.original_max_model_len = -1
    report = inspect_model(config)
    model = config.model_config.hf_config
    hidden, inner, heads = model.hidden_size, model.intermediate_size, model.num_attention_heads
    q, kv = (count * model.head_dim for count in (heads, model.num_key_value_heads))
    numbers = (3 * hidden + q + 2 * kv) + (q + hidden) + (2 * hidden + 2 * inner)
    numbers += inner + hidden
    slots, rank, item_bytes, chiplets = 2, 8, 4, 4
    expected = model.num_hidden_layers * numbers * slots * rank * item_bytes * chiplets
    assert report.memory is not None
    assert report.memory.lora_bytes == expected
    assert dict(report.lines())["adapters"] == "2 slots for ranks up to 8"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rbln": {"use_device_tensor": False}}, "device 'rebel' without torch-rbln"),
        ({"rbln": {"enable_warm_up": False}}, "VLLM_RBLN_ENABLE_WARM_UP=0"),
        ({"lora_target_modules": ["q_proj", "experts"]}, "--lora-target-modules experts"),
        ({"lora_target_modules": ["lm_head"]}, "--lora-target-modules lm_head"),
        ({"lora_target_modules": ["embed_tokens"]}, "LoRA adapters of embeddings"),
        ({"fully_sharded_loras": True}, "--fully-sharded-loras"),
    ],
)
@pytest.mark.usefixtures("sdk")
def test_what_an_npu_does_not_adapt_is_refused_by_name(
    checkpoints: CheckpointCache,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    named: str,
) -> None:
    path = checkpoints("llama", **LONG)
    configure(path, monkeypatch)
    with pytest.raises(ValidationError, match=named):
        configure(path, monkeypatch, **options)


@pytest.mark.engine
@pytest.mark.wide
def test_the_routes_of_a_server(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    """One name has two adapters, one after the other, while the base model answers."""
    loras = Loras(checkpoints("llama", **LONG), tmp_path)
    flags = ["--additional-config", '{"rbln": {"device": "rebel"}}', "--max-model-len", "2048"]
    flags += ["--block-size", "1024", "--max-num-batched-tokens", "128", "--enable-lora"]
    flags += ["--num-gpu-blocks-override", "16", "--max-loras", "2", "--max-lora-rank", "32"]
    environment = torch_rbln_variables() | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    flags += ["--lora-root", str(tmp_path), "--allow-unguarded-changes"]
    with RealServer(
        loras.checkpoint, tmp_path, *flags, environment=environment, own_imports=True
    ) as server:
        server.until_ready()
        post, get = server.client.post, server.client.get

        def answer(model: str) -> list[int]:
            body = {"model": model, "prompt": ONE_CHUNK, "max_tokens": NUM_TOKENS, "logprobs": 0}
            body |= {"temperature": 0, "return_tokens_as_token_ids": True, "ignore_eos": True}
            found = post("/v1/completions", json=body)
            assert found.status_code == 200, found.text
            tokens = found.json()["choices"][0]["logprobs"]["tokens"]
            return [int(token.removeprefix("token_id:")) for token in tokens]

        for name in ("a", "b"):
            load = post("/v1/load_lora_adapter", json={"lora_name": "own", "lora_path": name})
            assert load.status_code == 200, load.text
            assert server.metric("rbln_lora_slots_used") == 1
            assert answer("own") == loras.answer(ONE_CHUNK, loras.paths[name])
            assert answer("tiny") == loras.answer(ONE_CHUNK, None)
            assert server.client.delete("/v1/lora_adapters/own").status_code == 200
            gone = post("/v1/completions", json={"model": "own", "prompt": "x"})
            assert gone.status_code == 404
        info = get("/v1/server_info").json()["lora"]
        assert (info["max_loras"], info["max_lora_rank"]) == (2, 32)
        assert info["bytes"] == server.metric('rbln_device_memory_bytes{kind="lora"') > 0
        assert server.metric("rbln_recompiles_after_warmup_total") == 0
