"""Tokens and log-probabilities equal transformers in float32, however a prompt is cut up."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.metrics.stats import PrefixCacheStats

from rbln_backend.core import UsefulRows
from rbln_backend.devices.emulated.compiler import EmulatedGraph
from tests.adapters import make_adapter
from tests.checkpoint_families import REQUIRED
from tests.checkpoint_weights import LOGIT_STD
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import hidden_states
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.support import (
    FEW,
    GREEDY,
    Stepped,
    assert_equals_reference,
    make_prompts,
    poison_padding,
)
from tests.engine.test_lora import LORA
from tests.engine.test_scheduling import greedy, tokens
from tests.reference import reference_generate

# The biases of qwen2 are also in test_families.py, as those of opt.
ARCHITECTURES = [
    ("llama", {}),
    ("qwen3", {"rbln": FEW}),
    pytest.param("qwen2", {}, marks=pytest.mark.wide),
]
# One token, both sides of a block (16), of a chunk (64), several chunks, up to the context's end.
PROMPT_LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130, 223]


@pytest.mark.engine
@pytest.mark.parametrize(("arch", "options"), ARCHITECTURES)
def test_each_prompt_alone(engines: Engines, arch: str, options: dict[str, Any]) -> None:
    engine = engines(arch, **options)
    for prompt in make_prompts(PROMPT_LENGTHS):
        assert_equals_reference(engine, [prompt], engine.generate([prompt], GREEDY))


@pytest.mark.engine
@pytest.mark.parametrize(("arch", "options"), ARCHITECTURES)
def test_all_prompts_in_one_batch(engines: Engines, arch: str, options: dict[str, Any]) -> None:
    engine = engines(arch, **options)
    prompts = make_prompts(PROMPT_LENGTHS, seed=8)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY))


@pytest.mark.engine
def test_prompt_logprobs(engines: Engines) -> None:
    engine = engines("llama")
    prompts = make_prompts([1, 2, 64, 65, 150], seed=9)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    head = load_file(engine.checkpoint / "model.safetensors")["lm_head.weight"]
    states, outputs = hidden_states(engine.checkpoint, prompts), engine.generate(prompts, params)
    for prompt, rows, output in zip(prompts, states, outputs, strict=True):
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        expected = (rows @ head.T).log_softmax(-1)
        for position in range(1, len(prompt)):
            entries = output.prompt_logprobs[position]
            assert prompt[position] in entries
            for token_id, entry in entries.items():
                wanted = float(expected[position - 1, token_id])
                assert entry.logprob == pytest.approx(wanted, abs=1e-3)


@pytest.mark.engine
def test_bfloat16_stays_close_to_the_reference(engines: Engines) -> None:
    engine = engines("llama", dtype="bfloat16")
    (prompt,) = make_prompts([100], seed=10)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    (output,) = engine.generate([prompt], params)
    expected = reference_generate(engine.checkpoint, prompt, 1).logprobs[0]
    for token_id, entry in output.outputs[0].logprobs[0].items():
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=0.5)


@pytest.mark.engine
def test_nothing_was_compiled_after_warm_up(engines: Engines) -> None:
    engine = engines("llama")
    engine.generate(make_prompts([3, 70, 200], seed=11), GREEDY)
    assert engine.total("rbln_recompiles_after_warmup_total") == 0
    assert engine.total("rbln_bucket_steps_total") > 0


# ---------------------------------------------------------------------------------- attention kinds
# Slopes by distance; chunks of 40 positions beside layers without any; layers without a cache.
ATTENTION_KINDS = ["falcon_rw", "llama4", "gemma4_shared"]
PROMPTS = make_prompts([1, 39, 65, 130], seed=71)


@pytest.mark.engine
@pytest.mark.parametrize("arch", ATTENTION_KINDS)
def test_tokens_equal_the_reference_also_after_a_prefix_hit(engines: Engines, arch: str) -> None:
    for prompt in PROMPTS:
        # Before the engine: vLLM wraps classes of transformers.
        reference_generate(engines.checkpoints(arch), prompt, 33)
    engine = engines(arch, rbln=FEW)
    assert_equals_reference(engine, PROMPTS, engine.generate(PROMPTS, GREEDY))
    again = engine.generate(PROMPTS, GREEDY)
    assert any(output.num_cached_tokens for output in again)
    assert_equals_reference(engine, PROMPTS, again)


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("arch", ATTENTION_KINDS)
def test_tensor_parallel_ranks_say_what_one_says(
    engines: Engines, tmp_path: Path, arch: str
) -> None:
    engine = engines(arch)
    answers = run_ranks(engine.checkpoint, tmp_path, PROMPTS, tensor_parallel_size=2)
    assert_as_one_rank(engine, PROMPTS, answers, 1e-4)


# -------------------------------------------------------------------------------------- checkpoints
OFTEN = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "opt", "gpt_oss")
# Tied heads without a gate in the MLP, factors on embeddings and logits.
SELDOM = sorted({*REQUIRED, "gpt2", "cohere", "gemma4_text"} - {*OFTEN})


@pytest.mark.parametrize(
    "arch", [*OFTEN, *(pytest.param(arch, marks=pytest.mark.wide) for arch in SELDOM)]
)
def test_greedy_continuations_have_clear_margins_and_do_not_repeat(
    checkpoints: CheckpointCache, arch: str
) -> None:
    path = checkpoints(arch)
    draw = random.Random(0)
    margins, spreads, distinct = [], [], 0
    for _ in range(8):
        prompt = [draw.randrange(4, 4000) for _ in range(16)]
        out = reference_generate(path, prompt, 16)
        margins.append(out.margins)
        spreads.append(out.logprobs.std(-1))
        distinct += len(set(out.token_ids))
    joined = torch.cat(margins)
    assert joined.median() > 0.3
    assert (joined > 1e-3).float().mean() > 0.98
    assert distinct > 8 * 8
    assert float(torch.cat(spreads).mean()) == pytest.approx(LOGIT_STD, rel=0.2)


# ------------------------------------------------------------------------------------------ padding
@pytest.mark.engine
@pytest.mark.parametrize(
    "arch", ["llama", "mistral", pytest.param("exaone4", marks=pytest.mark.wide)]
)
def test_nan_in_padding_changes_no_token(engines: Engines, arch: str, tmp_path: Path) -> None:
    poisoned = poison_padding(engines.checkpoints(arch), tmp_path / "model")
    engine = engines.fresh(arch, checkpoint=poisoned, rbln=FEW)
    for cache in engine.kv_caches():
        cache.fill_(float("nan"))
    # Prompts of 5 and 70 leave padded rows in their chunks, three requests one in the batch.
    prompts = make_prompts([5, 70, 130], seed=21)
    outputs = engine.generate(prompts, greedy(30))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_generate(engines.checkpoints(arch), prompt, 30)
        assert tokens([output]) == [expected.token_ids]
    assert any(torch.isnan(cache[0]).any() for cache in engine.kv_caches()), "the null block"


@pytest.mark.engine
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


# --------------------------------------------------------------------------------------- neighbours
MASKED = {"allowed_token_ids": [300, 301, 302]}
FEATURES: tuple[dict[str, Any], ...] = (
    {"allowed_token_ids": [*range(20, 90)], "logprobs": 2},
    {"bad_words": ["the", "a"]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"presence_penalty": 1.5, "logprobs": 0},
    {"logit_bias": {42: 3.0, 99: 2.5}},
    {"min_tokens": 9, "stop_token_ids": [*range(0, 4096, 2)]},
    {"min_p": 0.2, "temperature": 0.8, "seed": 4},
    {"top_k": 7, "temperature": 1.2, "seed": 5},
    {"top_p": 0.7, "temperature": 1.2, "seed": 6, "logprobs": 3},
    {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{9}"}, "ignore_eos": False},
    {"structured_outputs": {"choice": ["red", "green"]}, "temperature": 1.0, "seed": 7},
    {"prompt_logprobs": 1},
    {"logprob_token_ids": [7, 300, 12, 9]},
    {"logprob_token_ids": [5], "temperature": 0.9, "seed": 8},
)


class Company(Stepped):
    def ask(
        self, name: str, prompt: list[int], options: dict[str, Any], lora: LoRARequest | None = None
    ) -> None:
        options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options
        if rules := options.pop("structured_outputs", None):
            options["structured_outputs"] = StructuredOutputsParams(**rules)
        self.add(name, prompt, SamplingParams(**options), lora)

    def to_the_end(self) -> None:
        super().to_the_end()
        assert self.engine.used_blocks() == 0

    def answer(self, name: str) -> tuple[Any, ...]:
        """Return tokens, the reason of the end, and all log-probabilities with their ranks."""
        output, (completion,) = self.outputs[name], self.outputs[name].outputs
        places = [*(completion.logprobs or ()), *filter(None, output.prompt_logprobs or ())]
        logprobs = [{token: (e.logprob, e.rank) for token, e in place.items()} for place in places]
        return self.tokens[name], completion.finish_reason, logprobs


@pytest.mark.engine
def test_a_mask_ends_with_its_request(engines: Engines) -> None:
    """A stream; B with allowed tokens beside it; A ends, so that B moves; others come after it."""
    company = Company(engines("llama"))
    prompts = make_prompts([20, 21, 22, 23], seed=3)
    company.ask("a", prompts[0], {})
    company.step(4)
    company.ask("b", prompts[1], {"allowed_token_ids": [300], "max_tokens": 60})
    while "a" in company.going:
        company.step()
    company.step(3)
    company.ask("c", prompts[2], {})
    company.ask("d", prompts[3], {})
    company.to_the_end()
    assert company.tokens["b"] == [300] * 60
    del company.requests["b"]
    company.assert_exact()


PREEMPTING = {"num_gpu_blocks_override": 18, "enable_prefix_caching": True}


IN_FLIGHT = {"async_scheduling": True}


@pytest.mark.engine
@pytest.mark.parametrize(
    "options",
    [LORA, PREEMPTING, LORA | IN_FLIGHT, PREEMPTING | IN_FLIGHT],
    ids=["adapters", "preempted", "adapters-in-flight", "preempted-in-flight"],
)
def test_arrivals_and_departures_change_no_answer(
    engines: Engines, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = engines("llama", **options)
    company, rng = Company(engine), random.Random(11)
    adapters: list[LoRARequest | None] = [None]
    if "enable_lora" in options:
        for number in (1, 2):
            folder = make_adapter(engine.checkpoint, tmp_path / str(number), seed=number)
            adapters.append(LoRARequest(f"neighbour-{number}", number, str(folder)))
    # Half of them plain, which show best what others left behind.
    requests = [
        (
            prompt,
            {"max_tokens": rng.randrange(4, 25)}
            | rng.choice((rng.choice(FEATURES), MASKED, {}, {})),
            rng.choice(adapters),
        )
        for prompt in make_prompts([3 + 7 * (n % 9) for n in range(60)], seed=12)
    ]
    for number, request in enumerate(requests):
        company.ask(f"alone-{number}", *request)
        company.to_the_end()
    aborted = set()
    for number, request in rng.sample([*enumerate(requests)], len(requests)):
        company.ask(f"beside-{number}", *request)
        company.step(rng.randrange(7))
        if company.going and rng.random() < 0.15:
            aborted.add(leaving := rng.choice(sorted(company.going)))
            company.abort(leaving)
    company.to_the_end()
    for number, (_, features, _) in enumerate(requests):
        if f"beside-{number}" not in aborted:
            together, alone = (company.answer(f"{when}-{number}") for when in ("beside", "alone"))
            assert together[0] == alone[0], features
            assert together == alone, features
    assert engine.total("rbln_recompiles_after_warmup_total") == 0
    for adapter in filter(None, adapters):
        engine.core.model_executor.driver_worker.worker.remove_lora(adapter.lora_int_id)


# ------------------------------------------------------------------------------------- plain decode
STEPS = 70


@dataclass
class Trace:
    """What each step of an engine had; blocks are numbered as they appear, the null block is 0."""

    steps: list[Any] = field(default_factory=list)
    plain: int = 0
    """Steps of the scheduler, and of the runner, that took the short path."""
    plain_runs: int = 0
    preempted: int = 0
    stats: Any = None
    """The latest statistics of the scheduler that were sent."""
    quiet: int = 0
    """Steps that sent none."""
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)

    def numbers(self, group: int, blocks: list[int]) -> list[int]:
        return [
            self.blocks.setdefault((group, block), len(self.blocks) + 1) if block else 0
            for block in blocks
        ]

    def scheduled(self, output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        self.steps.append(
            (
                [*map(_name, output.num_scheduled_tokens.items())],
                [*map(_name, cached.req_ids)],
                cached.num_computed_tokens,
                cached.num_output_tokens,
                [ids and [*starmap(self.numbers, enumerate(ids))] for ids in cached.new_block_ids],
                sorted(map(_name, output.finished_req_ids)),
                sorted(map(_name, output.preempted_req_ids or ())),
                output.total_num_scheduled_tokens,
                output.has_structured_output_requests,
            )
        )

    def ran(self, inputs: Any) -> None:
        for name, tensor in inputs.tensors.items():
            values = tensor.flatten().tolist()
            if "block_tables" in name:
                values = self.numbers(int(name.rpartition(".")[2]), values)
            self.steps.append((str(inputs.spec), name, values))


def _name(found: Any) -> Any:
    return (_name(found[0]), found[1]) if isinstance(found, tuple) else found.split("-")[0]


@contextmanager
def traced(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, plain: bool) -> Iterator[Trace]:
    trace, scheduler = Trace(), engine.core.scheduler
    steps = engine.core.model_executor.driver_worker.worker._runner
    with monkeypatch.context() as patch:
        if not plain:
            patch.setattr(scheduler._plain, "_is_allowed", False)
            patch.setattr(steps, "_is_sole", False)

        def around(owner: Any, name: str, see: Callable[..., None]) -> None:
            method = getattr(owner, name)

            def seen(*args: Any, **options: Any) -> Any:
                result = method(*args, **options)
                see(result, *args)
                return result

            patch.setattr(owner, name, seen)

        def count(name: str, result: Any) -> None:
            setattr(trace, name, getattr(trace, name) + (result is not None))

        def reported(outputs: Any, *_: Any) -> None:
            sent = [step.scheduler_stats for step in outputs.values() if step.scheduler_stats]
            trace.quiet += not sent
            trace.stats = stats = sent[-1] if sent else trace.stats
            known = stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage
            counts = len(scheduler.running), len(scheduler.waiting)
            assert known == (*counts, scheduler.kv_cache_manager.usage)

        patch.setattr(scheduler, "log_stats", True)
        patch.setattr(scheduler.kv_cache_manager, "log_stats", True)
        patch.setattr(scheduler.kv_cache_manager, "prefix_cache_stats", PrefixCacheStats())
        around(scheduler, "update_from_output", reported)
        around(scheduler, "schedule", lambda output, *_: trace.scheduled(output))
        around(scheduler, "_preempt_request", lambda *_: count("preempted", True))
        around(scheduler._plain, "schedule", lambda found, *_: count("plain", found))
        around(steps, "run_plain", lambda found, *_: count("plain_runs", found))
        around(steps, "_run", lambda _, step, *__: trace.ran(step.inputs))
        yield trace


def params_of(rng: random.Random, number: int) -> SamplingParams:
    """Parameters of which none, or one, ends an answer or changes it."""
    special: dict[str, Any] = rng.choice(
        [{}, {}, {"logprobs": 2}, {"presence_penalty": 1.5}, {"min_tokens": 4}]
    )
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=number,
        max_tokens=rng.randint(4, 100),
        stop_token_ids=rng.sample(range(3, 200), rng.choice([0, 0, 20])),
        **special,
    )


def play(engine: Engine, seed: int, trace: Trace, pace: float) -> None:
    """Requests join, leave, are aborted and end, at random, the same for each ``seed``."""
    rng, core = random.Random(seed), engine.llm.llm_engine
    engine.core.scheduler.reset_prefix_cache()
    prompts, live, added = make_prompts([rng.randint(1, 40) for _ in range(14)], seed=seed), [], 0
    for step in range(400):
        while added < len(prompts) and (step < STEPS or not live) and rng.random() < pace:
            core.add_request(
                str(added), {"prompt_token_ids": prompts[added]}, params_of(rng, added)
            )
            live.append(str(added))
            added += 1
        if live and rng.random() < 0.02:
            core.abort_request([live.pop(rng.randrange(len(live)))])
        for output in core.step():
            given = output.outputs[0]
            trace.steps.append((output.request_id, list(given.token_ids), str(given.logprobs)))
            if output.finished:
                live.remove(output.request_id)
        if added == len(prompts) and not live:
            break
    core.step()
    assert not live
    assert engine.used_blocks() == 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("arch", "options"),
    [("llama", {}), ("llama", PREEMPTING), ("gemma3_text", {})],
    ids=["blocks", "preempted", "windows"],
)
def test_plain_steps_have_the_inputs_of_full_ones(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, arch: str, options: dict[str, Any]
) -> None:
    engine = engines(arch, **options)
    # Other tests share the engine: the worker learns of their last requests here.
    engine.llm.llm_engine.step()
    plain_steps, preempted = 0, 0
    pace = 0.9 if options else 0.3
    for seed in range(2):
        with traced(engine, monkeypatch, plain=False) as full:
            play(engine, seed, full, pace)
        with traced(engine, monkeypatch, plain=True) as plain:
            play(engine, seed, plain, pace)
        for number, (expected, found) in enumerate(zip(full.steps, plain.steps, strict=True)):
            assert found == expected, f"seed {seed}, record {number}"
        assert (full.plain, full.plain_runs, full.quiet) == (0, 0, 0)
        assert plain.quiet
        plain_steps += min(plain.plain, plain.plain_runs)
        preempted += plain.preempted
    assert plain_steps > 40
    assert bool(preempted) is bool(options)


# --------------------------------------------------------------------------------- prompts together
# 58 tokens for a chunk of 64: one prompt of a single token, and both sides of a page of 16.
LENGTHS = [23, 1, 17, 17]
PACKED_TOKENS = 6
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=PACKED_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1
)
SEEDED = SamplingParams(
    temperature=0.9, seed=5, max_tokens=PACKED_TOKENS, ignore_eos=True, logprobs=3
)


def outcome(output: Any) -> list[Any]:
    (completion,) = output.outputs
    steps = [*completion.logprobs, *filter(None, output.prompt_logprobs or ())]
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in steps]
    return [list(completion.token_ids), logprobs]


def steps(engine: Engine) -> tuple[float, float]:
    """Prefill steps, and the prompts in them."""
    names = ("rbln_bucket_steps_total", "rbln_bucket_useful_rows_total")
    counts = [engine.total(name, phase="prefill") for name in names]
    return counts[0], counts[1]


def run(engine: Engine, prompts: list[list[int]], params: Any) -> tuple[list[Any], float, float]:
    """The answers, prefill steps and prompts in them; nothing is hit."""
    engine.core.scheduler.reset_prefix_cache()
    before = steps(engine)
    outputs = engine.generate(prompts, params)
    taken, held = steps(engine)
    return outputs, taken - before[0], held - before[1]


def assert_bits_of_each_alone(engine: Engine, seed: int) -> None:
    prompts = make_prompts(LENGTHS, seed=seed)
    for params in (PARAMS, SEEDED):
        alone = [outcome(run(engine, [prompt], params)[0][0]) for prompt in prompts]
        outputs, taken, held = run(engine, prompts, params)
        assert (taken, held) == (1, 4)
        assert [outcome(output) for output in outputs] == alone
    assert engine.total("rbln_recompiles_after_warmup_total") == 0


@pytest.mark.engine
def test_in_bfloat16(engines: Engines) -> None:
    assert_bits_of_each_alone(engines("llama", dtype="bfloat16"), seed=71)


@pytest.mark.engine
def test_the_tokens_are_those_of_the_reference(engines: Engines) -> None:
    engine = engines("llama")
    prompts = make_prompts(LENGTHS, seed=72)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
    outputs, taken, _ = run(engine, prompts, params)
    assert taken == 1
    assert_equals_reference(engine, prompts, outputs, 20)


@pytest.mark.engine
def test_a_prefix_is_computed_once(engines: Engines) -> None:
    engine = engines("llama")
    (stem,) = make_prompts([32], seed=73)
    prompts = [stem + tail for tail in make_prompts([5, 6, 7], seed=74)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
    outputs, taken, held = run(engine, prompts, params)
    # The first computes it, the other two hit it and share a step.
    assert (taken, held) == (2, 3)
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32]
    assert_equals_reference(engine, prompts, outputs, 20)


@pytest.mark.engine
@pytest.mark.wide
def test_one_prompt_a_step_is_a_setting(engines: Engines) -> None:
    engine = engines("llama", rbln={"prefill_prompts": 1})
    _, taken, held = run(engine, make_prompts(LENGTHS, seed=72), PARAMS)
    # A prompt of one token has no chunk.
    assert (taken, held) == (3, 3)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("options", "rbln"), [({}, {"use_custom_kernel": True}), ({"runner": "pooling"}, {})]
)
def test_where_a_step_has_one_prompt_more_are_refused(
    engines: Engines, options: dict[str, Any], rbln: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"several prompts in one prefill step.*prefill_prompts"):
        engines.fresh("llama", rbln={"prefill_prompts": 2, **rbln}, **options)


# Windows and pages, a window alone, sinks, latent attention, slopes, chunks of the context, caches
# that layers share, experts; values as e4m3.
KINDS = [
    *"gemma3_text mistral gpt_oss deepseek_v3 bloom llama4 gemma3n_text".split(),
    *"qwen3_moe mixtral gemma2".split(),
]


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", KINDS)
def test_every_kind_of_attention(engines: Engines, arch: str, dtype: str) -> None:
    assert_bits_of_each_alone(engines(arch, dtype=dtype), seed=75)


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_a_cache_of_e4m3(engines: Engines, arch: str) -> None:
    assert_bits_of_each_alone(engines(arch, kv_cache_dtype="fp8"), seed=76)
