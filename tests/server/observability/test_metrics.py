"""The server's own metrics: guides of answers, the tuner's advice, adapters, the event loop."""

import asyncio
import dataclasses
import io
import json
import logging
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from rbln_backend.reports.info import BucketsInfo, DescriptionWriter
from rbln_backend.usage import Usage, UsageFile, about_engine
from server.host.tasks import background_task
from server.observability.logging import (
    MAX_CHARS,
    JsonFormatter,
    TextFormatter,
    bound_vllm_log,
    exception_text,
    shown,
)
from server.observability.metrics import (
    MAX_ADAPTERS_SHOWN,
    OUTCOMES,
    ServerMetrics,
    follow_event_loop,
)
from server.observability.traffic import KEPT, BucketAdvice, History, PaddedWork, Traffic
from server.structured_outputs.constraint import GUIDES, get_constraints, get_kind
from server.wire import Endpoint
from tests.checkpoints import CheckpointCache
from tests.ports import free_port
from tests.server.adapter_folders import write_adapter
from tests.server.observability.kv_subscriber import KvSubscriber
from tests.server.real_server import RealServer
from tests.server.scripted import ScriptedPort, registry

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def values(metrics: ServerMetrics, name: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [s for family in families for s in family.samples if s.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def recorded(run_dir: Path, sizes: dict[int, int]) -> UsageFile:
    """Let an engine of one decode bucket, 8, have run decode steps of these sizes."""
    usage = Usage(about=about_engine("m", "cpu", decode_buckets=(8,), prefill_buckets=(64,)))
    for size, steps in sizes.items():
        for _ in range(steps):
            usage.phases["decode"].note(size, 8, 0.01)
    usage.phases["decode"].note(1, 1, 0.004 * 12, 12)
    file = UsageFile(run_dir / "usage.json")
    file.add(usage)
    info = BucketsInfo(decode=[8], prefill=[64], usage_file=str(file.path))
    DescriptionWriter(run_dir, 0).write("buckets", info)
    return file


def test_a_label_value_that_nobody_declared_ends_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = ServerMetrics(tmp_path)
    metrics.count("rbln_http_requests_total", "/", "GET", "200", "new")
    metrics.count("rbln_structured_output_requests_total", "new", "ok")
    metrics.count("rbln_admission_rejections_total", "new")
    metrics.count("rbln_key_rejections_total", "key", "new")
    metrics.count("rbln_http_connection_refusals_total", "new")
    assert values(metrics, "rbln_admission_rejections_total")["new",] == 1
    assert len(caplog.records) == 5


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, "json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar"),
        ({"structured_outputs": {"structural_tag": {}}}, "structural_tag"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_each_guide_has_a_name(fields: dict[str, Any], kind: str) -> None:
    assert get_kind(get_constraints(Endpoint.CHAT, fields)) == kind
    assert kind in GUIDES


def test_guided_answers_are_counted_within_bounds(tmp_path: Path) -> None:
    metrics = ServerMetrics(tmp_path)
    name = "rbln_structured_output_requests_total"
    assert set(values(metrics, name).values()) == {0.0}
    for kind in GUIDES:
        for outcome in OUTCOMES:
            metrics.count(name, kind, outcome)
    assert set(values(metrics, name).values()) == {1.0}
    assert len(values(metrics, name)) == len(GUIDES) * len(OUTCOMES)


async def test_what_holds_the_event_loop_is_seen(tmp_path: Path) -> None:
    metrics = ServerMetrics(tmp_path)
    observe = partial(metrics.observe, "rbln_serve_event_loop_lag_seconds")
    async with background_task(follow_event_loop(observe, period_s=0.01)):
        while not values(metrics, "rbln_serve_event_loop_lag_seconds_count").get((), 0):
            await asyncio.sleep(0.01)
        time.sleep(0.6)  # noqa: ASYNC251 (what must not happen)
        await asyncio.sleep(0.05)
    late = values(metrics, "rbln_serve_event_loop_lag_seconds_bucket")
    assert late["+Inf",] > late["0.5",]
    assert values(metrics, "rbln_serve_event_loop_lag_seconds_sum")[()] > 0.5


async def test_the_tuners_advice_is_published_and_renewed(tmp_path: Path) -> None:
    now = 0.0
    metrics, advice = ServerMetrics(tmp_path), BucketAdvice(tmp_path, clock=lambda: now)
    metrics.observe_advice(await advice.latest())
    assert values(metrics, "rbln_bucket_suggested") == {}

    file = recorded(tmp_path, {1: 36, 5: 12})
    metrics.observe_advice(await advice.latest())
    assert values(metrics, "rbln_bucket_suggested") == {}, "looked at again within seconds"
    now = 6.0
    metrics.observe_advice(await advice.latest())
    kept = {("decode", "1"): 1.0, ("decode", "5"): 1.0, ("decode", "8"): 1.0}
    assert _by_phase(values(metrics, "rbln_bucket_suggested")) == kept
    saving = values(metrics, "rbln_bucket_suggested_saving_ratio")["decode",]
    assert 0.2 < saving < 0.7
    padding = values(metrics, "rbln_bucket_suggested_padding_ratio")
    assert padding["decode", "current"] > 0.5
    assert padding["decode", "suggested"] == 0.0
    assert values(metrics, "rbln_bucket_recorded_steps") == {("decode",): 60.0}

    # Another minute, other traffic: what is no longer suggested is gone.
    other = Usage(about=about_engine("m", "cpu", decode_buckets=(4, 8), prefill_buckets=(64,)))
    for _ in range(10_000):
        other.phases["decode"].note(8, 8, 0.01)
    file.path.unlink()
    file.add(other)
    now = 30.0
    assert (await advice.latest() or {})["decode"]["steps"] == 60
    now = 70.0
    metrics.observe_advice(await advice.latest())
    found = _by_phase(values(metrics, "rbln_bucket_suggested"))
    assert found == {("decode", "4"): 1.0, ("decode", "8"): 1.0}


def _by_phase(found: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """The samples under (phase, bucket), in whatever order a page has the labels."""
    return {tuple(sorted(labels, reverse=True)): value for labels, value in found.items()}


async def test_adapters_are_shown_while_they_are_there(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    metrics, adapters = ServerMetrics(tmp_path), registry(ScriptedPort(), tmp_path)
    await adapters.load("one", "a")
    metrics.observe_adapters(adapters)
    assert {"one", "ready"} <= set(*values(metrics, "rbln_lora_adapter_info"))
    assert values(metrics, "rbln_lora_adapters")["ready",] == 1
    await adapters.unload("one", wait=True)
    metrics.observe_adapters(adapters)
    assert values(metrics, "rbln_lora_adapter_info") == {}
    assert adapters.max_loras <= MAX_ADAPTERS_SHOWN


# ------------------------------------------------------------------------------------------ history
async def test_a_sample_has_the_work_of_its_interval_and_the_state_at_its_end() -> None:
    before = dataclasses.replace(
        Traffic(), output_tokens=100, prompt_tokens=7, decode=PaddedWork(30, 10)
    )
    now = Traffic(
        output_tokens=160,
        prompt_tokens=7,
        running=3,
        waiting=2,
        kv_cache_usage=0.51239,
        decode=PaddedWork(45, 15),
        prefill=PaddedWork(0, 0),
    )
    totals = iter([before, now])
    history = History(lambda: next(totals))
    await history.take()
    assert history.after(0) == [], "an interval needs its beginning"
    await asyncio.sleep(0.01)
    await history.take()
    (sample,) = history.after(0)
    assert (sample.output_tokens, sample.prompt_tokens) == (60, 0)
    assert (sample.running, sample.waiting, sample.kv_cache_usage) == (3, 2, 0.5124)
    assert (sample.decode_padding, sample.prefill_padding) == (0.25, None)
    assert sample.seconds >= 0.01


async def test_the_first_sample_has_what_ran_since_the_engine_was_there() -> None:
    first = dataclasses.replace(Traffic(), output_tokens=8)
    totals = iter([None, None, first])
    history = History(lambda: next(totals))
    for _ in range(3):
        await history.take()
    assert [sample.output_tokens for sample in history.after(0)] == [8]


async def test_the_latest_samples_are_kept_and_found_by_number() -> None:
    history = History(Traffic)
    for _ in range(KEPT + 4):
        await history.take()
    kept = [sample.number for sample in history.after(0)]
    assert kept == list(range(4, KEPT + 4))
    assert [sample.number for sample in history.after(KEPT + 1)] == [KEPT + 2, KEPT + 3]
    assert history.after(KEPT + 3) == []
    # The number of a longer process before this one.
    assert [sample.number for sample in history.after(9999)] == kept


async def test_a_reading_that_fails_leaves_out_one_sample() -> None:
    given = iter([0, 5, None, 12])

    def read() -> Traffic:
        tokens = next(given, 12)
        if tokens is None:
            raise FileNotFoundError("counter_9.db")
        return dataclasses.replace(Traffic(), output_tokens=tokens)

    history = History(read)
    async with background_task(history.follow(0.001)), asyncio.timeout(10):
        while len(history.after(0)) < 3:
            await asyncio.sleep(0.001)
    assert [sample.output_tokens for sample in history.after(0)][:3] == [5, 7, 0]


# ----------------------------------------------------------------------------------------- log text
FORGED = "x\n12:00:00 INFO    server.service: all is well\r\x1b[2J\x07\u2028\u202e\x85end"
HUGE = "secret " * 200_000


def record(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("server.x", logging.ERROR, "f", 1, message, args, info)


def failed(message: str) -> ValueError:
    """An error with a cause, both of which quote a client."""
    try:
        try:
            raise KeyError(message)
        except KeyError as cause:
            raise ValueError(message) from cause
    except ValueError as error:
        return error


def test_controls_are_escaped_and_lines_indented() -> None:
    line = TextFormatter().format(record("Ignored: %s", FORGED, error=failed(FORGED)))
    first, *others = line.split("\n")
    assert "server.x: Ignored: x" in first
    assert all(other.startswith("    | ") for other in others)
    assert not set("\r\x1b\x07\u2028\u202e\x85") & set(line)
    assert "\\x1b[2J" in line
    entry = json.loads(JsonFormatter().format(record("%s", FORGED, error=failed(FORGED))))
    assert entry["message"] == FORGED
    assert "\n" not in JsonFormatter().format(record("%s", FORGED))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_lines_have_a_length(formatter: logging.Formatter) -> None:
    whole = formatter.format(record("%s", HUGE, error=failed(HUGE)))
    assert len(whole) < 3 * MAX_CHARS
    assert "more characters" in whole
    assert len(shown("\n" * 100_000)) < 2 * MAX_CHARS


def test_tracebacks_have_causes_frames_and_short_messages() -> None:
    error = failed("a reason " + HUGE)
    text = exception_text((ValueError, error, error.__traceback__))
    assert text.count("in failed") == 2
    assert text.index("KeyError: ") < text.index("which led to:") < text.index("ValueError: ")
    assert "a reason" in text
    assert len(text) < 2000


@pytest.fixture
def vllm_log() -> Iterator[io.StringIO]:
    """Return the output of vLLM's handler after `bound_vllm_log`."""
    logger = logging.getLogger("vllm")
    kept = logger.handlers, logger.level, logger.propagate
    stream = io.StringIO()
    logger.handlers, logger.propagate = [logging.StreamHandler(stream)], False
    logger.setLevel(logging.INFO)
    bound_vllm_log()
    bound_vllm_log()
    assert len(logger.handlers[0].filters) == 1
    yield stream
    logger.handlers, logger.level, logger.propagate = kept


def test_vllms_modules_log_nothing_that_clients_wrote(vllm_log: io.StringIO) -> None:
    logging.getLogger("vllm.renderers.hf").warning("Chat template rejected: %s", FORGED)
    try:
        raise failed("secret")
    except ValueError:
        logging.getLogger("vllm.entrypoints.openai.serving").exception("Error in stream: secret")
        logging.getLogger("vllm.tool_parsers.hermes").exception("Error in extracting a call")
    logging.getLogger("vllm.tool_parsers.hermes").error("Error in %s", "secret")
    logging.getLogger("vllm.v1.metrics").info("Engine 000: %s", FORGED)
    lines = vllm_log.getvalue().splitlines()
    assert lines[0] == "Error in extracting a call (ValueError)"
    assert lines[1] == "Error in %s"
    assert lines[2] == "Engine 000: x"
    assert all(line.startswith("    | ") for line in lines[3:])
    assert "secret" not in vllm_log.getvalue()
    assert "\x1b" not in vllm_log.getvalue()


def test_debug_level_leaves_vllms_log_as_it_is(vllm_log: io.StringIO) -> None:
    logger = logging.getLogger("vllm")
    logger.handlers[0].filters.clear()
    logger.setLevel(logging.DEBUG)
    bound_vllm_log()
    logging.getLogger("vllm.renderers.hf").warning("Chat template rejected: %s", "a")
    assert vllm_log.getvalue() == "Chat template rejected: a\n"


# ---------------------------------------------------------------------------------------- kv events
TOPIC = "kv@10.0.0.7:8000@tiny"
BLOCK, UNIT, BLOCKS = 64, 16, 5  # room for one request of 256 tokens, and the null block
FEW = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "1")


class Followed:
    """Server that publishes KV events, and a router that follows it from its start on."""

    def __init__(self, checkpoint: Path, folder: Path, *flags: str) -> None:
        ports = free_port(), free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": TOPIC,
            # vLLM binds where the host is a star, and connects to a name.
            "endpoint": f"tcp://*:{ports[0]}",
            "replay_endpoint": f"tcp://*:{ports[1]}",
        }
        self.addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        self.server = RealServer(
            checkpoint, folder, "--block-size", str(BLOCK), *flags,
            "--kv-events-config", json.dumps(events),
        )  # fmt: skip
        self.router = KvSubscriber(*self.addresses)

    def __enter__(self) -> "Followed":
        self.server.until_ready()
        # A subscription takes a moment to arrive; the replay port has what was missed.
        self.complete([7] * UNIT * 2)
        self.router.catch_up()
        return self

    def __exit__(self, *_: object) -> None:
        self.router.close()
        self.server.__exit__(None, None, None)

    def complete(self, prompt: list[int], **fields: Any) -> int:
        """Return the tokens that the answer says were cached."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        answer = self.server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


@pytest.fixture(scope="module")
def followed(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Followed]:
    model = checkpoints("llama", dtype="float32")
    with Followed(model, Path(tmp_path_factory.mktemp("s")), *FEW) as one:
        yield one


@pytest.mark.engine
def test_units_are_stored_in_a_chain_and_removed_when_others_need_room(followed: Followed) -> None:
    prompt = [20 + i for i in range(3 * UNIT + 5)]
    followed.complete(prompt)
    [stored] = followed.router.read()
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size) == (prompt[: 3 * UNIT], UNIT)
    assert (stored.parent_block_hash, len(set(stored.block_hashes))) == (None, 3)
    assert (stored.kv_cache_spec_kind, stored.group_idx) == ("full_attention", 0)

    assert followed.complete(prompt[: 3 * UNIT] + [90] * (UNIT + 1)) == 3 * UNIT
    more = [event for event in followed.router.read() if isinstance(event, BlockStored)]
    # The block fills up. Its first three units are not stored again: the fourth follows them.
    assert [(e.parent_block_hash, e.token_ids) for e in more] == [
        (stored.block_hashes[-1], [90] * UNIT)
    ]

    followed.complete([150] * (4 * BLOCK - 2))
    gone = [event for event in followed.router.read() if isinstance(event, BlockRemoved)]
    assert {*stored.block_hashes} <= {name for event in gone for name in event.block_hashes}
    assert followed.router.index.hit(prompt) == 0 == followed.complete(prompt)


@pytest.mark.engine
def test_a_router_predicts_every_hit(followed: Followed) -> None:
    rng = random.Random(0)
    assert _predict(followed, rng) > 10
    assert followed.router.topics == {TOPIC}
    assert followed.router.ranks == {0}


def _predict(followed: Followed, rng: random.Random) -> int:
    """Send prompts with common prefixes; return how many hits there were."""
    stems = [[rng.randrange(5, 200) for _ in range(200)] for _ in range(3)]
    hits = 0
    for _ in range(30):
        prompt = rng.choice(stems)[: rng.randrange(1, 201)] + [rng.randrange(5, 200)] * 3
        followed.router.read(wait_ms=50)
        predicted = followed.router.index.hit(prompt)
        hits += predicted > 0
        assert followed.complete(prompt) == predicted
    return hits


@pytest.mark.engine
def test_a_cleared_cache_is_reported_at_once(followed: Followed) -> None:
    prompt = [30] * (2 * UNIT + 1)
    followed.complete(prompt)
    followed.router.read()
    assert followed.router.index.hit(prompt) == 2 * UNIT
    assert followed.server.client.post("/reset_prefix_cache").json() == {"success": True}
    assert followed.router.read() == [AllBlocksCleared()]
    assert followed.router.index.hit(prompt) == 0 == followed.complete(prompt)


@pytest.mark.engine
def test_a_gap_is_filled_from_the_replay_port(followed: Followed) -> None:
    followed.router.read()
    late = KvSubscriber(*followed.addresses)
    prompt = [41] * (2 * UNIT + 1)
    followed.complete(prompt)
    # This one may or may not have received the batch; both know all that came before.
    late.read()
    late.catch_up()
    followed.router.read()
    assert late.replayed > 0
    assert late.index.held == followed.router.index.held
    # After a lost batch, the next one makes the subscriber ask for it.
    late._events.unsubscribe("kv@")
    time.sleep(0.2)
    followed.complete([42] * (UNIT + 1))
    late._events.subscribe("kv@")
    time.sleep(0.2)
    followed.complete([43] * (UNIT + 1))
    late.read()
    followed.router.read()
    assert late.index.hit([42] * (UNIT + 1)) == UNIT
    assert late.index.held == followed.router.index.held
    late.close()


@pytest.mark.engine
def test_windows_have_events_of_their_own(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    model = checkpoints("gemma3_text", dtype="float32")
    with ExitStack() as stack:
        followed = stack.enter_context(Followed(model, tmp_path))
        assert _predict(followed, random.Random(1)) > 10
        events = followed.router.index.windows
        assert sorted(map(bool, events.values())) == [False, True]
