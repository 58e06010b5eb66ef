"""Pushed frames are the bytes that vLLM's generators make, in their order, with the same usage."""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import CompletionUsage
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats

from default_model.paths import CHAT_TEMPLATE
from server.engine.outputs import QueueAwareOutputs
from server.http.streaming import ChunkWriter, HeldStream, SseResponse
from server.request.endpoints import get_route
from server.request.record import Counts, RequestRecord, record_var
from server.vllm import text_stream
from server.vllm.handlers import adapted, extended_frames
from server.vllm.parser import object_call_parser
from server.vllm.sampling import add_prediction_counts
from server.vllm.templates import is_bounded
from server.vllm.text_stream import DirectState
from server.vllm.tools import with_tool_prompt
from server.wire import DirectFrames, Endpoint
from tests.checkpoints import CheckpointCache
from tests.server.vllm.test_prompts import SMOLLM2

TIMEOUT_S = 20
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STAMP = {"service_tier": "flex"}


@pytest.fixture
def _makers() -> None:
    text_stream.install()


@pytest.fixture(scope="module")
def tokenizer(checkpoints: CheckpointCache) -> Any:
    return get_tokenizer(str(checkpoints("llama", dtype="float32")))


class Writer(ChunkWriter):
    """The connection: bytes of both ways in the order in which they were sent."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        connection: Any = SimpleNamespace(write=self._push)
        super().__init__(connection, connection)
        self._ready = ready
        self.sent = b""
        self.pushed = 0

    @property
    def is_ready(self) -> bool:
        return self._ready()

    def _push(self, chunk: bytes) -> None:
        self.sent += chunk.partition(b"\r\n")[2].removesuffix(b"\r\n")
        self.pushed += 1

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)
        self.sent += message.get("body", b"")


class Played:
    """One stream of an engine whose tokens are given."""

    def __init__(self, tokenizer: Any, ready: Callable[[], bool]) -> None:
        engine = SimpleNamespace(
            renderer=SimpleNamespace(tokenizer=tokenizer),
            log_stats=True,
            scheduler_config=SimpleNamespace(stream_interval=1),
            output_processor=SimpleNamespace(tracing_enabled=False),
        )
        made: Any = engine
        self.outputs = QueueAwareOutputs(made, 0.0, logs_deltas=False)
        self.writer = Writer(ready)
        self.record = RequestRecord(get_route("/v1/completions"), "POST", time.perf_counter())
        self._tokenizer = tokenizer

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make its record that of the request in the block."""
        token = record_var.set(self.record)
        try:
            yield
        finally:
            record_var.reset(token)

    def add(self, name: str = "1", **sampling: Any) -> RequestOutputCollector:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling)
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[5, 6, 7],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queue = RequestOutputCollector(RequestOutputKind.DELTA, name)
        self.outputs.add_request(request, "a prompt", queue=queue)
        return queue

    async def play(
        self, frames: AsyncGenerator[str, None], steps: list[list[int]], pauses: Callable[[], int]
    ) -> str:
        """Return all that was sent; `pauses` gives turns of the event loop after each step."""
        whole = extended_frames(Endpoint.CHAT, frames, STAMP, self.record)
        response = SseResponse(HeldStream(whole), self.record)
        scope: Any = {"extensions": {"rbln_serve.chunks": {"writer": self.writer}}}

        async def receive() -> Any:
            await asyncio.Event().wait()

        answer = asyncio.ensure_future(response(scope, receive, self.writer.send))
        for number, tokens in enumerate(steps):
            last = number == len(steps) - 1
            self.step(tokens, FinishReason.LENGTH if last else None)
            for _ in range(pauses()):
                await asyncio.sleep(0)
        await asyncio.wait_for(answer, TIMEOUT_S)
        return self.writer.sent.decode()

    def step(self, tokens: list[int], reason: FinishReason | None = None) -> None:
        output = EngineCoreOutput(request_id="1", new_token_ids=tokens, finish_reason=reason)
        self.outputs.process_outputs([output], time.time(), IterationStats())


async def outputs_of(queue: RequestOutputCollector) -> AsyncGenerator[Any, None]:
    finished = False
    while not finished:
        output: Any = queue.get_nowait() or await queue.get()
        finished = output.finished
        yield output


async def numbered(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with aclosing(outputs):
        async for output in outputs:
            yield 0, output


def bare(serving: Any) -> Any:
    made = serving.__new__(serving)
    made.parser_cls = made.parser = made.request_logger = made.system_fingerprint = None
    made.enable_force_include_usage = made.use_harmony = made.enable_log_outputs = False
    made.enable_prompt_tokens_details = made.enable_per_request_metrics = False
    made.response_role = "assistant"
    made._include_reasoning_tokens_details = False
    return adapted(made)


def chat(queue: RequestOutputCollector, tokenizer: Any, **fields: Any) -> Any:
    request = ChatCompletionRequest(messages=HI, model="m", stream=True, **fields)
    return bare(chat_serving.OpenAIServingChat).chat_completion_stream_generator(
        request, outputs_of(queue), "chatcmpl-é", "m", [], tokenizer, SimpleNamespace()
    )


def parsed_chat(queue: RequestOutputCollector, tokenizer: Any, **fields: Any) -> Any:
    """The default server's chat, whose parser has work where there are tools alone."""
    request = ChatCompletionRequest(messages=HI, model="m", stream=True, **fields)
    serving = bare(chat_serving.OpenAIServingChat)
    parser: Any = ParserManager.get_parser("hermes", None, enable_auto_tools=True)
    serving.parser_cls, serving.model_config = object_call_parser(parser), None
    return serving.chat_completion_stream_generator(
        request,
        outputs_of(queue),
        "chatcmpl-é",
        "m",
        request.messages,
        tokenizer,
        SimpleNamespace(),
    )


def completion(queue: RequestOutputCollector, tokenizer: Any, **fields: Any) -> Any:
    request = CompletionRequest(prompt="hi", model="m", stream=True, **fields)
    return bare(completion_serving.OpenAIServingCompletion).completion_stream_generator(
        request,
        [],
        numbered(outputs_of(queue)),
        "cmpl-é",
        1,
        "m",
        1,
        tokenizer,
        SimpleNamespace(),
    )


USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture
def _one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000)


async def frames_of(
    tokenizer: Any,
    make: Callable[..., Any],
    steps: list[list[int]],
    fields: dict[str, Any],
    sampling: dict[str, Any],
    ready: Callable[[], bool],
    pauses: Callable[[], int] = lambda: 60,
) -> tuple[str, Played]:
    played = Played(tokenizer, ready)
    with played.current():
        frames = make(played.add(**sampling), tokenizer, **fields)
        return await played.play(frames, steps, pauses), played


def random_steps(tokenizer: Any, rng: random.Random) -> list[list[int]]:
    """One token per step, now and then several or an empty text: bytes of characters among them."""
    size = len(tokenizer)
    texts = ['"quoted" \\ back', "漢字🙂é", "\u2028</script>\x00\x1f", "word " * 3]
    tokens = [token for text in texts for token in tokenizer.encode(text)]
    tokens += [rng.randrange(size) for _ in range(200)]
    rng.shuffle(tokens)
    steps = []
    while tokens:
        count = 3 if rng.random() < 0.1 else 1
        steps.append(tokens[:count])
        tokens = tokens[count:]
    return steps


@pytest.mark.usefixtures("_makers", "_one_second")
@pytest.mark.parametrize("make", [chat, parsed_chat, completion])
@pytest.mark.parametrize(
    ("fields", "sampling"),
    [({}, {}), (USAGE, {}), (USAGE, {"stop": ["never in it", "zq"]})],
    ids=["plain", "usage", "stop"],
)
async def test_pushed_frames_are_those_of_the_generators(
    tokenizer: Any, make: Any, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    steps = random_steps(tokenizer, random.Random(make.__name__))
    args = (tokenizer, make, steps, fields, {"max_tokens": 1000, **sampling})
    theirs, none = await frames_of(*args, lambda: False)
    ours, pushed = await frames_of(*args, lambda: True)
    assert ours == theirs
    assert none.writer.pushed == 0
    # All but the first text, from which the others are learned, the end and empty texts.
    assert pushed.writer.pushed >= sum(map(bool, texts_of(ours))) - 3
    assert pushed.record.sent_frames == none.record.sent_frames
    if fields:
        usage = json.loads(ours.split("data: ")[-2])["usage"]
        assert usage["completion_tokens"] == sum(map(len, steps))


@pytest.mark.usefixtures("_makers", "_one_second")
@pytest.mark.parametrize("make", [chat, completion])
async def test_a_slow_client_gets_the_same_text_and_usage(tokenizer: Any, make: Any) -> None:
    rng = random.Random(7)
    steps = random_steps(tokenizer, rng)
    args = (tokenizer, make, steps, USAGE, {"max_tokens": 1000})
    theirs, _ = await frames_of(*args, lambda: False)
    ours, played = await frames_of(
        *args, lambda: rng.random() < 0.5, lambda: rng.choice((0, 0, 1, 3, 60))
    )
    assert 20 < played.writer.pushed < sum(map(bool, texts_of(theirs))) - 3
    # Frames that waited are merged, as vLLM merges them.
    assert "".join(texts_of(ours)) == "".join(texts_of(theirs))
    assert ours.split("data: ")[-2:] == theirs.split("data: ")[-2:]


def texts_of(sent: str) -> list[str]:
    return [
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in _choices(sent)
    ]


def _choices(sent: str) -> Iterator[dict[str, Any]]:
    for frame in sent.split("\n\n"):
        data = frame.removeprefix("data: ")
        if data not in ("", "[DONE]"):
            yield from json.loads(data)["choices"]


@pytest.mark.usefixtures("_makers", "_one_second")
@pytest.mark.parametrize(
    ("make", "fields", "sampling"),
    [
        (chat, {}, {"logprobs": 1}),
        (chat, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {}),
        (chat, {"return_token_ids": True}, {}),
        (completion, {"return_token_ids": True}, {}),
        (completion, {}, {"stream_interval": 2}),
        (parsed_chat, {"tools": [TOOL]}, {}),
        (parsed_chat, {"tools": [TOOL], "echo": True, "add_generation_prompt": False}, {}),
    ],
    ids=["logprobs", "usages", "chat's ids", "completion's ids", "interval", "tools", "echo"],
)
async def test_streams_with_more_than_text_are_not_pushed(
    tokenizer: Any, make: Any, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    steps = [[10 + number] for number in range(12)]
    _, played = await frames_of(
        tokenizer, make, steps, fields, {"max_tokens": 100, **sampling}, lambda: True
    )
    assert played.writer.pushed == 0


@pytest.mark.usefixtures("_makers", "_one_second")
async def test_two_requests_of_one_stream_are_not_pushed(tokenizer: Any) -> None:
    played = Played(tokenizer, lambda: True)
    with played.current():
        frames = completion(played.add(max_tokens=100), tokenizer)
        played.add("2", max_tokens=100)
        await played.play(frames, [[10 + n] for n in range(12)], lambda: 60)
    assert played.writer.pushed == 0


@pytest.mark.usefixtures("_makers", "_one_second")
async def test_nothing_is_pushed_after_the_client_has_gone(tokenizer: Any) -> None:
    played = Played(tokenizer, lambda: True)
    with played.current():
        frames = completion(played.add(max_tokens=100), tokenizer)
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    response = SseResponse(HeldStream(frames), played.record)
    scope: Any = {"extensions": {"rbln_serve.chunks": {"writer": played.writer}}}
    record_var.set(played.record)
    answer = asyncio.ensure_future(response(scope, receive, played.writer.send))
    for number in range(8):
        played.step([10 + number])
        await asyncio.sleep(0.001)
    assert played.writer.pushed
    gone.set()
    await asyncio.wait_for(answer, TIMEOUT_S)
    sent = played.writer.sent
    assert isinstance(played.outputs.request_states["1"], DirectState)
    played.step([30])
    assert played.writer.sent == sent
    assert played.record.outcome == "aborted"


@pytest.mark.usefixtures("_makers", "_one_second")
def test_frames_of_other_forms_are_not_learned() -> None:
    for frame, is_learned in (
        ('data: {"text":"a","end":1}\n\n', True),
        ('data: {"text":"a","end":1,"more":2}\n\n', False),
        ('event: delta\ndata: {"delta":"a"}\n\n', False),
    ):
        direct = DirectFrames()
        direct.claims = 1
        direct.note_text('"a"', ',"end":1}')
        direct.resume(frame, Writer(lambda: True))
        assert (direct.writer is not None) is is_learned


# -------------------------------------------------------------------------------------- predictions
@pytest.fixture
def record() -> Iterator[RequestRecord]:

    given = RequestRecord(get_route("/v1/chat/completions"), "POST", time.perf_counter())
    token = record_var.set(given)
    yield given
    record_var.reset(token)


def usage(**more: Any) -> Any:
    from vllm.entrypoints.serve.engine.protocol import UsageInfo

    return UsageInfo(prompt_tokens=3, completion_tokens=9, total_tokens=12, **more)


def details(meter: Counts | None, record: RequestRecord, **more: Any) -> Any:
    record.tokens.prediction = meter
    whole = usage(**more)
    add_prediction_counts(whole)
    return CompletionUsage.model_validate_json(whole.model_dump_json()).completion_tokens_details


def test_a_whole_answers_usage_has_them(record: RequestRecord) -> None:
    found = details(lambda: (7, 2), record)
    assert (found.accepted_prediction_tokens, found.rejected_prediction_tokens) == (7, 2)
    assert details(None, record) is None


def test_what_is_known_of_thinking_stays(record: RequestRecord) -> None:
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    known = CompletionTokenUsageInfo(reasoning_tokens=5)
    found = details(lambda: (7, 2), record, completion_tokens_details=known)
    assert (found.reasoning_tokens, found.accepted_prediction_tokens) == (5, 7)


def test_the_last_chunk_of_a_stream_has_them(record: RequestRecord) -> None:
    from vllm.entrypoints.openai.chat_completion import protocol

    from server.vllm.text_stream import ChatMakers

    makers = ChatMakers(
        object, protocol.ChatCompletionResponseStreamChoice, protocol.ChatCompletionStreamResponse
    )
    record.tokens.prediction = lambda: (1, 8)
    chunk = makers.chunk(
        id="a",
        object="chat.completion.chunk",
        created=1,
        choices=[],
        model="m",
        usage=usage(),
        metrics=None,
    )
    told = json.loads(chunk.model_dump_json(exclude_unset=True, exclude_none=True))
    assert told["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 8,
    }


# -------------------------------------------------------------------------------------------- loops
def loops(*heads: str, inner: str = "x") -> str:
    """Return nested loops."""
    return "".join(f"{{% for {head} %}}" for head in heads) + inner + "{% endfor %}" * len(heads)


MESSAGES = "m in messages"
TEXT = "messages[0].content"
BOUNDED = [
    CHAT_TEMPLATE.read_text(),
    with_tool_prompt(SMOLLM2, system=True, parts=False),
    with_tool_prompt(SMOLLM2, system=False, parts=True),
    loops(MESSAGES, "c in m.content"),
    loops(MESSAGES, "call in m.tool_calls or []", "key, value in call.arguments | items"),
    loops(f"{MESSAGES}[1:]", "tool in tools", "key, value in tool.function.items()"),
    loops(f"{MESSAGES}[::-1]", "i in ['a', 'b']"),
    loops("i in range(messages | length - 1, -1, -1)"),
    loops("i in range(10)"),
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    + loops("m in turns", "n in turns"),
    "{% macro show(parts) %}" + loops("p in parts") + "{% endmacro %}"
    "{% for m in messages %}{% set parts = m.content %}{{ show(parts) }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% not a template",
]
UNBOUNDED = [
    loops("i in range(90000)", "j in range(90000)"),
    loops("i in range(90000)"),
    loops(MESSAGES, inner="{{ range(90000) | list }}"),
    "{% set n = 90000 %}" + loops("i in range(n)"),
    "{% set r = range(90000) %}" + loops("i in r", "j in r"),
    loops("i in range(100)", "j in range(100)", "k in range(100)", "l in range(100)"),
    loops("i in range(messages[0].content | length)"),
    loops("a in 'x' * 90000", "b in 'x' * 90000"),
    loops("a in [0] * 90000", "b in [0] * 90000"),
    loops(f"a in {TEXT}", f"b in {TEXT}"),
    f"{{% set t = {TEXT} %}}" + loops("a in t", "b in t"),
    loops(MESSAGES, "a in m.content", "b in m.content"),
    loops(MESSAGES, "n in messages", "o in messages"),
    loops(MESSAGES, "tool in tools", "n in messages"),
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(40) }}",
    "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(x) %}" + loops("a in x", "b in x") + f"{{% endmacro %}}{{{{ f({TEXT}) }}}}",
    "{% macro f(x) %}"
    + loops("a in x")
    + "{% endmacro %}"
    + loops(MESSAGES, inner=f"{{{{ f({TEXT}) }}}}"),
    "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call f() %}x{% endcall %}",
    "{% if tools %}{% set t = messages %}{% else %}{% set t = messages[0].content %}{% endif %}"
    + loops("a in t", "b in t"),
    "{{ lipsum(n=90000) }}",
    "{% include 'x' %}",
]


@pytest.mark.parametrize("template", BOUNDED)
def test_loops_over_the_conversation(template: str) -> None:
    assert is_bounded(template)


@pytest.mark.parametrize("template", UNBOUNDED)
def test_loops_that_multiply(template: str) -> None:
    assert not is_bounded(template)
