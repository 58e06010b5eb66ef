"""Several ranks say what one says: tensor, pipeline and data parallel, alone and together."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.conftest import DEFAULTS, Engine, Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.support import FEW, assert_equals_reference, make_prompts
from tests.engine.test_moe import PATHS
from tests.graph_cache import graph_cache
from tests.kernel_cache import share_kernels

pytestmark = pytest.mark.engine

# A token, blocks and chunks to both sides of their ends; more prompts than a step takes.
PROMPTS = make_prompts([1, 17, 64, 65, 130, 200], seed=500)
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
DATA: dict[str, Any] = {"data_parallel_size": 2}
FEW_GRAPHS: dict[str, Any] = {"additional_config": {"rbln": {"num_threads": 1} | FEW}}
# Ranks add up their parts of a sum; stages and engines compute what one rank computes.
ROUNDING, NONE = 1e-4, 0.0
wide = pytest.mark.wide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (TENSOR | FEW_GRAPHS, ROUNDING),
        pytest.param(TENSOR | {"async_scheduling": True}, ROUNDING, marks=wide),
        pytest.param(PIPELINE, NONE, marks=wide),
        pytest.param(TENSOR | PIPELINE, ROUNDING, marks=wide),
        pytest.param(DATA, NONE, marks=wide),
        pytest.param(TENSOR | DATA, ROUNDING, marks=wide),
        pytest.param(PIPELINE | DATA, NONE, marks=wide),
    ],
)
def test_ranks_say_what_one_says(
    engines: Engines, options: dict[str, Any], tolerance: float
) -> None:
    engine = engines("llama")
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, tolerance)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("options", [TENSOR, PIPELINE])
@pytest.mark.parametrize("arch", ["qwen3", "exaone4"])
def test_other_layers(engines: Engines, arch: str, options: dict[str, Any]) -> None:
    """Norms over heads; sliding windows in some layers, which may all lie in one stage."""
    engine = engines(arch)
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS, **options)
    assert_as_one_rank(engine, PROMPTS, answers, ROUNDING)


@pytest.mark.slow
@pytest.mark.wide
def test_without_kernels_ranks_talk_through_torch(engines: Engines) -> None:
    engine = engines("llama")
    plain = {"additional_config": {"rbln": {"num_threads": 1, "kernels": "aten"}}}
    answers = run_ranks(engine.checkpoint, graph_cache(), PROMPTS[:3], **TENSOR, **plain)
    assert_as_one_rank(engine, PROMPTS[:3], answers, ROUNDING)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("options", [TENSOR, PIPELINE])
def test_a_store_that_lacks_graphs_of_one_rank(
    engines: Engines, tmp_path: Path, options: dict[str, Any]
) -> None:
    """As a start leaves it that was killed: ranks have not come equally far."""
    engine = engines("llama")
    prompts = PROMPTS[:3]
    run_ranks(engine.checkpoint, tmp_path, prompts, **options)
    stored = artifacts(tmp_path)
    for artifact in stored[::3]:
        shutil.rmtree(artifact)
    answers = run_ranks(engine.checkpoint, tmp_path, prompts, **options)
    assert_as_one_rank(engine, prompts, answers, ROUNDING)
    assert artifacts(tmp_path) == stored


def artifacts(cache_root: Path) -> list[Path]:
    return sorted(path.parent for path in (cache_root / "rbln" / "graphs").rglob("manifest.json"))


# ------------------------------------------------------------------------------------- expert ranks
PROMPT_LENGTHS = [3, 17, 64, 65, 130, 200]
# Sums over ranks are taken in another order than within one.
TOLERANCE = 1e-4
NUM_TOKENS = 16
SHORT = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)

Generate = Callable[[list[int], int | None], Awaitable[Any]]


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of this process would take the process groups of its engines for its own."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def chosen_logprobs(outputs: Sequence[Any]) -> list[list[float]]:
    return [
        [step[token].logprob for token, step in zip(o.token_ids, o.logprobs, strict=True)]
        for o in (output.outputs[0] for output in outputs)
    ]


def assert_same(outputs: Sequence[Any], alone: Sequence[Any]) -> None:
    for one, other in zip(outputs, alone, strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)
    for mine, theirs in zip(chosen_logprobs(outputs), chosen_logprobs(alone), strict=True):
        assert mine == pytest.approx(theirs, abs=TOLERANCE)


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize(
    ("arch", "path"),
    [
        ("mixtral", "opt"),
        ("qwen2_moe", "opt"),
        ("gpt_oss", "opt"),
        ("glm4_moe", "opt"),
        ("qwen3_moe", "opt"),
        ("qwen3_moe", "custom"),
        ("qwen3_moe", "native"),
    ],
)
def test_experts_of_two_ranks(engines: Engines, arch: str, path: str) -> None:
    prompts = make_prompts(PROMPT_LENGTHS, seed=61)
    alone = engines(arch).generate(prompts, SHORT)
    engine = engines.fresh(
        arch, rbln=PATHS[path], tensor_parallel_size=2, enable_expert_parallel=True
    )
    try:
        outputs = engine.generate(prompts, SHORT)
    finally:
        engine.core.shutdown()
    assert_equals_reference(engine, prompts, outputs, NUM_TOKENS)
    assert_same(outputs, alone)


def data_parallel_args(engine: Engine, **options: Any) -> AsyncEngineArgs:
    rbln = {
        "cache_root": str(share_kernels(engine.run_dir / "cache")),
        "run_dir": str(engine.run_dir),
        "num_threads": 1,
    }
    return AsyncEngineArgs(
        model=str(engine.checkpoint),
        additional_config={"rbln": rbln},
        data_parallel_size=2,
        **(DEFAULTS | options),
    )


def on_two_engines(args: AsyncEngineArgs, use: Callable[[Generate], Awaitable[None]]) -> None:
    """Run ``use`` with a function that generates on the engine of a number, None: on any."""

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(args)
        numbers = iter(range(1000))

        async def generate(prompt: list[int], rank: int | None) -> Any:
            number = str(next(numbers))
            outputs = llm.generate(
                {"prompt_token_ids": prompt}, SHORT, number, data_parallel_rank=rank
            )
            return [output async for output in outputs][-1]

        try:
            await use(generate)
        finally:
            llm.shutdown()

    asyncio.run(run())


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"enable_expert_parallel": True}),
        ("qwen2_moe", {"enable_expert_parallel": True}),
        ("gpt_oss", {}),
        ("gpt_oss", {"enable_expert_parallel": True}),
        ("mixtral", {"tensor_parallel_size": 2}),
        ("qwen2_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("mixtral", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"pipeline_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_two_engines_share_experts(engines: Engines, arch: str, options: dict[str, Any]) -> None:
    single = engines(arch)
    prompts = make_prompts(PROMPT_LENGTHS, seed=61)
    alone = single.generate(prompts, SHORT)

    async def use(generate: Generate) -> None:
        # One rank works, the other runs padding; then neither; then both, chunks beside decodes.
        assert_same([await generate(prompt, 1) for prompt in prompts], alone)
        await asyncio.sleep(0.5)
        both = [generate(prompt, place % 2) for place, prompt in enumerate(prompts)]
        assert_same(await asyncio.gather(*both), alone)
        assert_same(await asyncio.gather(*(generate(p, None) for p in prompts)), alone)

    on_two_engines(data_parallel_args(single, **options), use)


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("options", [{}, {"pipeline_parallel_size": 2}])
def test_requests_that_come_and_go_at_any_time(engines: Engines, options: dict[str, Any]) -> None:
    single = engines("qwen3_moe")
    chooser = random.Random(62)
    prompts = make_prompts([chooser.randrange(1, 220) for _ in range(40)], seed=62)
    alone = single.generate(prompts, SHORT)

    async def use(generate: Generate) -> None:
        async def later(place: int, prompt: list[int]) -> Any:
            await asyncio.sleep(chooser.random() * 2)
            return await generate(prompt, place % 2 if place % 3 else 0)

        jobs = (later(place, prompt) for place, prompt in enumerate(prompts))
        assert_same(await asyncio.gather(*jobs), alone)

    on_two_engines(data_parallel_args(single, enable_expert_parallel=True, **options), use)


# ---------------------------------------------------------------------------------------------- ray
CLUSTER = Path(__file__).parent / "ray_cluster.py"
RAY_PROMPTS = make_prompts([1, 65, 130], seed=510)
RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster whose two nodes have one device each."""
    pytest.importorskip("ray", reason="requirements/ray.txt is not installed")
    with subprocess.Popen(
        [sys.executable, str(CLUSTER), "1", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Ray makes its workers nice; they would wait for everything else on this machine.
        env=dict(os.environ) | {"RAY_worker_niceness": "0"},
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = next(line for line in process.stdout if line.startswith("ADDRESS "))
        yield line.split()[1]
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_on_two_nodes(
    engines: Engines, tmp_path: Path, address: str, options: dict[str, Any]
) -> None:
    engine = engines("llama")
    answers = run_ranks(
        engine.checkpoint,
        tmp_path,
        RAY_PROMPTS,
        environment={"RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0"},
        **RAY,
        **options,
    )
    assert_as_one_rank(engine, RAY_PROMPTS, answers, 1e-4)
