"""The queue of waiting requests: priorities, preemption by priority, the end of a wait."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from rbln_backend.config import BACKGROUND_PRIORITY, QUEUE_TIMEOUT
from rbln_backend.scheduler import priorities
from tests.engine.conftest import Engine, Engines
from tests.engine.support import FEW, AnyLength, Oracle, Stepped, make_prompts
from tests.engine.test_equality import KINDS, outcome
from tests.engine.test_lora import LORA, Adapters, worker
from tests.engine.test_speculation import SUFFIX, Pair, results, texts_of

pytestmark = pytest.mark.engine

MAX_QUEUE_S = 60.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine(engines: Engines) -> Engine:
    # 17 usable blocks of 16: four requests of 6 blocks each do not fit.
    return engines(
        "llama",
        scheduling_policy="priority",
        num_gpu_blocks_override=18,
        rbln={"max_queue_ms": int(MAX_QUEUE_S * 1000)},
    )


CLOCK = Clock()
"""One for all tests, as they share an engine: time does not go back."""


@pytest.fixture
def clock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(engine.core.scheduler._expiry, "_clock", CLOCK)
    return CLOCK


@pytest.fixture
def queue(engine: Engine) -> Stepped:
    return Stepped(engine)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def finish(queue: Stepped) -> None:
    queue.to_the_end()
    queue.core.step()
    queue.assert_exact()


def test_a_request_that_waits_too_long_ends_and_no_other(queue: Stepped, clock: Clock) -> None:
    prompts = make_prompts([5, 6, 7, 8, 20, 30], seed=8)
    for number, prompt in enumerate(prompts[:4]):
        queue.add(f"runs-{number}", prompt, greedy(20))
    queue.add("waits", prompts[4], greedy(2))
    queue.step(6)
    clock.now += MAX_QUEUE_S - 1
    queue.add("later", prompts[5], greedy(2))
    queue.step()
    assert "waits" not in queue.outputs
    clock.now += 1.5
    queue.step()
    assert_waited_too_long(queue)
    # The last one waited for a second and a half of its own.
    finish(queue)


def assert_waited_too_long(queue: Stepped) -> None:
    (completion,) = queue.outputs["waits"].outputs
    ended = completion.finish_reason, completion.stop_reason, list(completion.token_ids)
    assert ended == ("error", QUEUE_TIMEOUT, [])
    del queue.requests["waits"]


def test_the_last_waiting_request_ends_although_nothing_runs(queue: Stepped, clock: Clock) -> None:
    queue.add("waits", make_prompts([20], seed=9)[0], greedy(2))
    clock.now += MAX_QUEUE_S + 1
    queue.step()
    assert_waited_too_long(queue)
    assert not queue.core.has_unfinished_requests()
    finish(queue)


def test_a_long_prefill_is_not_waiting(queue: Stepped, clock: Clock) -> None:
    queue.add("long", make_prompts([200], seed=10)[0], greedy(3))
    queue.step()
    clock.now += 2 * MAX_QUEUE_S
    finish(queue)


def test_an_aborted_or_finished_request_is_not_missed(queue: Stepped, clock: Clock) -> None:
    prompts = make_prompts([5, 6], seed=11)
    queue.add("finishes", prompts[0], greedy(1))
    finish(queue)
    queue.add("aborted", prompts[1], greedy(1))
    queue.abort("aborted")
    clock.now += 2 * MAX_QUEUE_S
    queue.add("next", prompts[1], greedy(1))
    finish(queue)


def test_waiting_requests_are_served_by_priority(queue: Stepped) -> None:
    prompts = make_prompts([5, 6, 7, 8, 9, 10, 11], seed=12)
    for number, prompt in enumerate(prompts[:4]):
        queue.add(f"runs-{number}", prompt, greedy(8 + 4 * number))
    queue.step(8)
    for number, (name, priority) in enumerate((("low", 5), ("middle", 0), ("high", -5)), 4):
        queue.add(name, prompts[number], greedy(3), priority=priority)
    finish(queue)
    assert queue.begun[4:] == ["high", "middle", "low"]


def test_the_lowest_priority_is_preempted(queue: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, preempted = queue.engine.core.scheduler, list[int]()
    original = scheduler._preempt_request

    def noting(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.priority)
        return original(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", noting)
    for number, prompt in enumerate(make_prompts([40, 45, 50, 55], seed=13)):
        # The first one, which by the order of arrival would be the last to go.
        queue.add(str(number), prompt, greedy(40), priority=9 if number == 0 else 0)
    finish(queue)
    assert preempted[0] == 9


# --------------------------------------------------------------------------------------- background
BUCKETS = {
    "decode_batch_bucket_strategy": "manual",
    "decode_batch_bucket_manual_buckets": [1, 2, 4, 8],
    # Padding is all that a chunk costs: 40 tokens are cut at 32.
    "prefill_step_tokens": 1,
}
NUM_TOKENS = 40


class Run(Stepped):
    def ask(self, name: str, prompt: list[int]) -> None:
        """Of the background if its name begins with "behind"."""
        priority = BACKGROUND_PRIORITY if name.startswith("behind") else 0
        self.add(name, prompt, greedy(NUM_TOKENS), priority=priority)


def rows(engine: Engine, kind: str) -> float:
    return engine.total("rbln_background_rows_total", kind=kind)


@pytest.fixture
def run(engines: Engines) -> Any:
    engine = engines("gemma3_text", max_num_seqs=8, rbln=BUCKETS)
    mixed = Run(engine)
    yield engine, mixed
    engine.llm.llm_engine.abort_request(list(mixed.requests))


def test_it_fills_the_bucket_of_who_comes_and_waits_otherwise(run: tuple[Engine, Run]) -> None:
    engine, mixed = run
    prompts = make_prompts([20, 70, 33, 50, 41, 25, 130], seed=90)
    alone, padding = rows(engine, "alone"), rows(engine, "padding")
    for number in range(4):
        mixed.ask(f"behind-{number}", prompts[number])
    mixed.until_begun(4)
    assert set(mixed.step()) == {f"behind-{number}" for number in range(4)}
    assert rows(engine, "alone") > alone
    assert rows(engine, "padding") == padding
    # The longest prompt of all is read before anything else moves, but for what is owed a step.
    for number in range(4, 7):
        mixed.ask(f"front-{number}", prompts[number])
    mixed.until_begun(7)
    # Three of the front have the bucket of four: one row is left, always the same one's.
    for _ in range(5):
        moved = set(mixed.step())
        assert {name for name in moved if name.startswith("front")} == {
            f"front-{number}" for number in range(4, 7)
        }
        assert {name for name in moved if name.startswith("behind")} == {"behind-0"}
    assert engine.total("rbln_background_parked") == 3
    assert rows(engine, "padding") > padding
    mixed.to_the_end()
    assert engine.total("rbln_background_parked") == 0
    mixed.assert_exact()


def test_the_front_takes_places_and_blocks(engines: Engines) -> None:
    engine = engines.fresh(
        "llama", max_num_seqs=4, num_gpu_blocks_override=24, enable_prefix_caching=False
    )
    mixed = Run(engine)
    prompts = make_prompts([40, 45, 50, 55, 90, 120], seed=91)
    for number in range(4):
        mixed.ask(f"behind-{number}", prompts[number])
    mixed.until_begun(4)
    # There is no place, and hardly a block.
    for number in (4, 5):
        mixed.ask(f"front-{number}", prompts[number])
    mixed.to_the_end()
    assert engine.total("rbln_background_preemptions_total") >= 2
    assert mixed.finished[:2] == ["front-4", "front-5"]
    mixed.assert_exact()


def test_prompts_of_the_background_come_seldom_beside_streams(run: tuple[Engine, Run]) -> None:
    _, mixed = run
    front, behind = make_prompts([30, 60], seed=92)
    mixed.ask("front", front)
    mixed.until_begun(1)
    mixed.ask("behind", behind)
    while "front" not in mixed.finished:
        assert mixed.step() == ["front"], "no chunk took its step"
    mixed.to_the_end()
    mixed.assert_exact()


def test_a_prompt_that_comes_seldom_is_not_cut(
    run: tuple[Engine, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it takes two steps; beside a stream the second would be a long time in coming."""
    engine, mixed = run
    monkeypatch.setattr(priorities, "STEPS_PER_CHUNK", 5)
    front, alone, behind = make_prompts([30, 40, 40], seed=93)
    before = chunks(engine)
    mixed.ask("behind-alone", alone)
    mixed.until_begun(1)
    assert chunks(engine) == before + 2
    mixed.ask("front", front)
    mixed.until_begun(2)
    before = chunks(engine)
    mixed.ask("behind", behind)
    mixed.until_begun(3)
    assert chunks(engine) == before + 1
    mixed.to_the_end()
    mixed.assert_exact()


# ----------------------------------------------------------------------------------- decode prefill
# One bucket: beside a stream three rows are to spare.
ONE_BUCKET = {"decode_batch_bucket_min": 4}
# As many log-probabilities as all: of equal ones another number shows others.
STREAM = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, logprobs=2)


def params(**options: Any) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2} | options
    return SamplingParams(**given)


SEEDED = params(temperature=0.9, seed=7)
CHOOSY = params(
    temperature=0.8,
    seed=8,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.3,
    logit_bias={20: 2.0},
    min_tokens=3,
)


class Mixed(Stepped):
    def ask(self, name: str, prompt: list[int], params: SamplingParams, lora: Any = None) -> None:
        """Of the background if its name begins with "line"."""
        priority = BACKGROUND_PRIORITY if name.startswith("line") else 0
        self.add(name, prompt, params, lora, priority)

    def assert_as_alone(self, plain: Engine | None = None) -> None:
        """Assert that every request gives the outcome that it has alone, in `plain` if given."""
        plain = plain or self.engine
        assert self.engine.used_blocks() == 0
        assert self.engine.total("rbln_recompiles_after_warmup_total") == 0
        for name, (prompt, params, lora) in self.requests.items():
            plain.core.scheduler.reset_prefix_cache()
            (alone,) = plain.llm.generate(
                [{"prompt_token_ids": prompt}], params, use_tqdm=False, lora_request=lora
            )
            if outcome(alone) != outcome(self.outputs[name]):
                pytest.fail(f"{name}: {self.tokens[name]}, not {outcome(alone)[0]}")


def chunks(engine: Engine) -> float:
    return engine.total("rbln_bucket_steps_total", phase="prefill")


def prefilled(engine: Engine) -> float:
    return engine.total("rbln_background_rows_total", kind="prompt")


def start(engine: Engine) -> Mixed:
    """One stream, whose prompt is read; nothing is hit."""
    engine.core.scheduler.reset_prefix_cache()
    mixed = Mixed(engine)
    mixed.ask("stream", make_prompts([20], seed=11)[0], STREAM)
    mixed.step()
    return mixed


def assert_prefilled_in_rows(engine: Engine, lines: list[SamplingParams]) -> None:
    mixed, before, earlier = start(engine), chunks(engine), prefilled(engine)
    prompts = make_prompts([70, 33, 1, 45], seed=12)
    for number, (prompt, wanted) in enumerate(zip(prompts, lines, strict=True)):
        mixed.ask(f"line-{number}", prompt, wanted)
    steps = 0
    while not mixed.finished:
        mixed.step()
        steps += 1
    mixed.to_the_end()
    assert chunks(engine) == before, "a prompt took a step"
    # The last token of a prompt is a row that decodes, but for who begins with it.
    assert prefilled(engine) - earlier == 69 + 32 + 1 + 44
    mixed.assert_as_alone()


def test_the_stream_is_held_up_by_nothing(engines: Engines) -> None:
    engine = engines("llama", rbln=ONE_BUCKET)
    assert_prefilled_in_rows(engine, [params(), SEEDED, params(), CHOOSY])
    mixed = start(engine)
    for number, prompt in enumerate(make_prompts([70, 60, 50], seed=13)):
        mixed.ask(f"line-{number}", prompt, params())
    for length in range(2, 60):
        mixed.step()
        (stream,) = (r for r in engine.core.scheduler.running if r.request_id.startswith("stream"))
        assert stream.num_output_tokens == length, "each step has a token for it"
    mixed.to_the_end()
    mixed.assert_as_alone()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=() if a == "gemma3_text" else pytest.mark.wide) for a in KINDS]
)
def test_every_kind_of_attention(engines: Engines, arch: str, dtype: str) -> None:
    engine = engines(arch, dtype=dtype, rbln=ONE_BUCKET)
    assert_prefilled_in_rows(engine, [params(), SEEDED, params(), CHOOSY])


def test_grammars_do_not_move_while_a_prompt_is_read(engines: Engines) -> None:
    engine = engines("llama", rbln=ONE_BUCKET)
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}

    def grammar() -> SamplingParams:
        # The engine writes into it what it chose.
        return params(
            structured_outputs=StructuredOutputsParams(json=schema), max_tokens=40, ignore_eos=False
        )

    mixed = start(engine)
    mixed.ask("other stream", make_prompts([9], seed=16)[0], grammar())
    for number, prompt in enumerate(make_prompts([40, 30], seed=14)):
        mixed.ask(f"line-{number}", prompt, grammar())
    mixed.to_the_end()
    assert mixed.outputs["line-0"].outputs[0].text.startswith("[")
    mixed.assert_as_alone()


def test_rows_of_several_adapters(engines: Engines, tmp_path: Path) -> None:
    engine = engines("llama", **LORA, rbln=ONE_BUCKET)
    adapters = Adapters(engine, tmp_path)
    one, two, three = (adapters(number, rank=4) for number in (1, 2, 3))
    mixed, before = start(engine), chunks(engine)
    prompts = make_prompts([40, 30, 35, 20], seed=15)
    for number, (prompt, lora) in enumerate(zip(prompts, (one, two, three, None), strict=True)):
        mixed.ask(f"line-{number}", prompt, params(), lora)
    mixed.to_the_end()
    assert chunks(engine) == before
    mixed.assert_as_alone()
    for number in worker(engine).list_loras():
        worker(engine).remove_lora(number)


def test_a_prefix_is_read_once(engines: Engines) -> None:
    engine = engines("llama", rbln=ONE_BUCKET)
    mixed, earlier = start(engine), prefilled(engine)
    (stem,) = make_prompts([48], seed=17)
    for number, tail in enumerate(make_prompts([5, 6, 7], seed=18)):
        mixed.ask(f"line-{number}", stem + tail, params())
    mixed.to_the_end()
    assert [mixed.outputs[f"line-{n}"].num_cached_tokens for n in range(3)] == [0, 48, 48]
    assert prefilled(engine) - earlier == 48 + 4 + 5 + 6
    mixed.assert_as_alone()


def test_chunks_take_the_prompt_of_which_most_is_left(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priorities, "STEPS_PER_CHUNK", 20)
    engine = engines("llama", rbln=ONE_BUCKET)
    mixed, before = start(engine), chunks(engine)
    for number, prompt in enumerate(make_prompts([50, 120], seed=19)):
        mixed.ask(f"line-{number}", prompt, params())
    mixed.step(24)
    assert chunks(engine) == before + 1
    left = {
        r.request_id[:6]: r.num_tokens - r.num_computed_tokens
        for r in engine.core.scheduler.running
        if r.priority == BACKGROUND_PRIORITY
    }
    # Each has read a token a step, and the long one a chunk of 64 besides.
    assert 25 < left["line-0"] < 31
    assert 30 < left["line-1"] < 38
    mixed.to_the_end()
    mixed.assert_as_alone()


def test_scores_of_prompts_come_from_chunks(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priorities, "STEPS_PER_CHUNK", 10)
    engine = engines("llama", rbln=ONE_BUCKET)
    mixed, before, earlier = start(engine), chunks(engine), prefilled(engine)
    mixed.ask("line-0", make_prompts([30], seed=20)[0], params(prompt_logprobs=1))
    mixed.to_the_end()
    assert (chunks(engine), prefilled(engine)) == (before + 1, earlier)
    mixed.assert_as_alone()


def test_decode_prefill_is_preempted_parked_and_aborted(engines: Engines) -> None:
    engine = engines(
        "llama", rbln=ONE_BUCKET, num_gpu_blocks_override=22, enable_prefix_caching=False
    )
    mixed = start(engine)
    prompts = make_prompts([60, 60, 60, 90, 12, 13], seed=21)
    for number in range(3):
        mixed.ask(f"line-{number}", prompts[number], params())
    mixed.step(30)
    before = engine.total("rbln_background_preemptions_total")
    # Blocks are few, and then rows.
    mixed.ask("stream 2", prompts[3], STREAM)
    mixed.step(10)
    assert engine.total("rbln_background_preemptions_total") > before
    mixed.ask("stream 3", prompts[4], params(max_tokens=30))
    mixed.ask("stream 4", prompts[5], params(max_tokens=30))
    mixed.step(10)
    mixed.abort("line-0")
    mixed.to_the_end()
    mixed.assert_as_alone()


def test_beside_steps_that_check_drafts(engines: Engines) -> None:
    engine = engines("llama", speculative_config=SUFFIX, rbln=FEW)
    plain = engines("llama", rbln=ONE_BUCKET)
    prompts = make_prompts([20, 25, 50, 30, 40], seed=22)
    names = ["stream 1", "stream 2", "line-0", "line-1", "line-2"]
    wanted = [STREAM, STREAM, params(), SEEDED, CHOOSY]
    oracle = Oracle(texts_of(prompts, results(plain, prompts, wanted)), 0.3)
    mixed, before, earlier = Mixed(engine), chunks(engine), prefilled(engine)
    with Pair(plain, engine).asking(oracle, AnyLength(2)):
        for request in zip(names, prompts, wanted, strict=True):
            mixed.ask(*request)
        mixed.to_the_end()
    assert engine.total("rbln_bucket_steps_total", phase="verify") > 20
    assert chunks(engine) <= before + 2
    assert prefilled(engine) - earlier == 49 + 29 + 39
    mixed.assert_as_alone(plain)


@pytest.mark.parametrize(
    ("arch", "num_blocks", "seed"),
    [("llama", 30, 0), pytest.param("gemma3_text", 60, 1, marks=pytest.mark.wide)],
)
def test_any_mix(engines: Engines, arch: str, num_blocks: int, seed: int) -> None:
    engine = engines(arch, num_gpu_blocks_override=num_blocks, rbln=ONE_BUCKET)
    mixed, rng, earlier = Mixed(engine), random.Random(seed), prefilled(engine)
    names: list[str] = []
    for number in range(40):
        name = f"{rng.choice(['stream', 'line', 'line'])} {number}"
        length = rng.choice([1, 2, 16, 17, 40, 64, 65, 130])
        wanted = params(
            temperature=rng.choice([0.0, 0.9]),
            seed=7,
            max_tokens=rng.randrange(1, 60),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        mixed.ask(name, make_prompts([length], seed=number % 7)[0], wanted)
        names.append(name)
        mixed.step(rng.randrange(12))
        running = [n for n in names if n not in mixed.finished]
        if running and rng.random() < 0.2:
            mixed.abort(running[0])
            names.remove(running[0])
    mixed.to_the_end()
    mixed.step()
    assert prefilled(engine) > earlier + 50
    mixed.assert_as_alone()
