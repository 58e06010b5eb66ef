"""Chats become messages of Anthropic's API: its own client puts the events together."""

import inspect
import json
import logging
import multiprocessing
import subprocess
import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from anthropic.types import Message

from server.errors import OverloadedError, ServerError, describe
from server.http.middleware import error_frame
from server.observability.logging import JsonFormatter, TextFormatter, request_id_var
from server.observability.metrics import OUTCOMES
from server.request.endpoints import get_route
from server.request.record import RequestRecord
from server.vllm.messages import make_message, message_events
from server.wire import Endpoint
from tests.checkpoints import CheckpointCache

HELD = (32, 16)
"""Tokens read from the prefix cache, and written to it."""


def chunk(delta: dict[str, Any], completion: int = 1, **choice: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-7",
        "model": "m",
        "choices": [{"index": 0, "delta": delta, **choice}],
        "usage": {"prompt_tokens": 50, "completion_tokens": completion},
    }


def call(index: int, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    found: dict[str, Any] = {"index": index, "function": function}
    return found | ({"id": f"chatcmpl-tool-{index}f"} if name else {})


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return chunk({"tool_calls": list(calls)})


def ending(reason: str, completion: int = 8, **choice: Any) -> dict[str, Any]:
    return chunk({}, completion, finish_reason=reason, **choice)


async def events(chunks: list[dict[str, Any]], max_tokens: int | None = 100) -> str:
    async def frames() -> AsyncGenerator[str, None]:
        for one in [chunk({"role": "assistant", "content": ""}, 0), *chunks]:
            yield f"data: {json.dumps(one)}\n\n"
        yield "data: [DONE]\n\n"

    stream = message_events(frames(), max_tokens, lambda: HELD, "standard")
    return "".join([event async for event in stream])


def put_together(stream: str) -> Message:
    """Have Anthropic's client read a stream."""
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=stream)
    )
    client = Anthropic(
        api_key="k", base_url="http://x", http_client=httpx2.Client(transport=transport)
    )
    with client.messages.stream(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "a"}]
    ) as events:
        message: Message = events.get_final_message()
    return message


def kinds(stream: str) -> list[str]:
    return [line[7:] for line in stream.splitlines() if line.startswith("event: ")]


async def test_a_text_is_one_block() -> None:
    stream = await events([chunk({"content": "Hel"}), chunk({"content": "lo"}), ending("stop")])
    assert kinds(stream) == [
        *"message_start ping content_block_start content_block_delta".split(),
        *"content_block_delta content_block_stop message_delta message_stop".split(),
    ]
    message = put_together(stream)
    assert message.id == "msg_7"
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello"}]
    assert message.stop_reason == "end_turn"
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == HELD
    assert (usage.input_tokens, usage.output_tokens) == (2, 8)


async def test_usage_is_told_when_the_message_starts() -> None:
    stream = await events([ending("stop")])
    start = json.loads(stream.splitlines()[1].removeprefix("data: "))["message"]
    assert start["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 16,
        "cache_read_input_tokens": 32,
        "output_tokens": 0,
        "service_tier": "standard",
    }


@pytest.mark.parametrize("reason", ["tool_calls", "stop"])
async def test_calls_are_blocks_of_their_own(reason: str) -> None:
    chunks = [
        chunk({"reasoning": "Hm."}),
        chunk({"content": "I look. "}),
        calling(call(0, "look", '{"at"')),
        calling(call(0, arguments=": 1}")),
        # Text in the middle of calls comes behind the one that is open.
        chunk({"content": "And"}),
        calling(call(0), call(1, "listen", "{}")),
        ending(reason),
    ]
    message = put_together(await events(chunks))
    assert [block.type for block in message.content] == [
        *"thinking text tool_use text tool_use".split()
    ]
    _, _, first, held, second = message.content
    assert first.type == second.type == "tool_use"
    assert held.type == "text"
    assert (first.id, first.name, first.input) == ("toolu_0f", "look", {"at": 1})
    assert (second.id, second.input, held.text) == ("toolu_1f", {}, "And")
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("last", "max_tokens", "reason", "sequence"),
    [
        (ending("stop", stop_reason="END"), 100, "stop_sequence", "END"),
        (ending("stop", stop_reason=3), 100, "end_turn", None),
        (ending("length"), 8, "max_tokens", None),
        (ending("length"), 100, "model_context_window_exceeded", None),
        # Inside of its reasoning, at its end token.
        (ending("length", stop_reason=3), 100, "max_tokens", None),
    ],
)
async def test_why_a_message_stopped(
    last: dict[str, Any], max_tokens: int, reason: str, sequence: str | None
) -> None:
    message = put_together(await events([chunk({"content": "a"}), last], max_tokens))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize(
    ("last", "max_tokens", "reason"),
    [
        (ending("length"), 8, "max_tokens"),
        (ending("length"), 100, "model_context_window_exceeded"),
        (ending("stop", stop_reason="END"), 100, "stop_sequence"),
        (ending("content_filter"), 100, "refusal"),
        (ending("stop"), 100, "max_tokens"),
    ],
)
async def test_a_call_that_was_cut_does_not_ask_for_its_tool(
    last: dict[str, Any], max_tokens: int, reason: str
) -> None:
    stream = await events([calling(call(0, "f", '{"a": "b')), last], max_tokens)
    assert f'"stop_reason":"{reason}"' in stream
    (choice,) = last["choices"]
    whole = answer(choice["finish_reason"], ('{"a": "b',), stop=choice.get("stop_reason"))
    assert make_message(whole, max_tokens, "standard")["stop_reason"] == reason


def answer(finish: str, calls: tuple[str, ...] = (), stop: str | None = None, **more: Any) -> Any:
    message = {
        "reasoning": None,
        "content": None,
        "tool_calls": [
            SimpleNamespace(
                id=f"chatcmpl-tool-{number}",
                function=SimpleNamespace(name="f", arguments=arguments),
            )
            for number, arguments in enumerate(calls)
        ],
    }
    choice = SimpleNamespace(
        finish_reason=finish, stop_reason=stop, message=SimpleNamespace(**message | more)
    )
    details = SimpleNamespace(cached_tokens=32, created_cache_tokens=16)
    usage = SimpleNamespace(prompt_tokens=50, completion_tokens=8, prompt_tokens_details=details)
    return SimpleNamespace(id="chatcmpl-7", model="m", choices=[choice], usage=usage)


def test_a_whole_answer_is_the_same_message() -> None:
    message = make_message(
        answer("stop", ('{"at": 1}',), reasoning="Hm.", content="I look."), 100, "standard"
    )
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 16,
        "cache_read_input_tokens": 32,
        "output_tokens": 8,
        "service_tier": "standard",
    }
    thinking, text, used = message["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm.", "I look.")
    assert used == {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"at": 1}}


def test_half_of_a_surrogate_pair_in_a_call() -> None:
    message = make_message(answer("stop", (r'{"at": "\ud83d"}',)), 100, "standard")
    assert message["stop_reason"] == "tool_use"
    assert message["content"][-1]["input"] == {"at": "\ufffd"}


def test_a_whole_answer_that_was_cut_off_has_what_there_is() -> None:
    message = make_message(answer("length", ('{"at": 1, "by',)), 8, "standard")
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {"at": 1}
    assert (
        make_message(answer("length"), 9, "standard")["stop_reason"]
        == "model_context_window_exceeded"
    )
    assert make_message(answer("stop"), 9, "standard")["content"] == [{"type": "text", "text": ""}]


# ------------------------------------------------------------------------------------------- errors
def all_classes(root: type[ServerError]) -> set[type[ServerError]]:
    return {root}.union(*(all_classes(child) for child in root.__subclasses__()))


def test_every_class_sets_a_code_of_its_own() -> None:
    for cls in all_classes(ServerError):
        assert "code" in vars(cls)
        assert cls.outcome in OUTCOMES
        assert 400 <= cls.status < 600
        assert cls.code.isidentifier()


def test_codes_are_unique_but_for_the_base_classes() -> None:
    codes = [cls.code for cls in all_classes(ServerError) - {ServerError}]
    assert len(codes) == len(set(codes))


def test_retry_after_is_a_header() -> None:
    headers = OverloadedError("busy", retry_after_s=2.5).headers
    assert headers == {"retry-after": "3", "retry-after-ms": "2500"}


def test_error_frames_follow_each_dialect() -> None:
    error = OverloadedError("busy", param="x")
    record = RequestRecord(get_route("/v1/responses"), "POST", 0.0, request_id="r1")
    record.sent_frames = 2
    chat = error_frame(error, Endpoint.CHAT, record)
    assert chat.endswith("\n\ndata: [DONE]\n\n")
    assert json.loads(chat.split("\n\n")[0].removeprefix("data: "))["error"]["param"] == "x"
    responses = error_frame(error, Endpoint.RESPONSES, record)
    assert responses.startswith("event: error\n")
    event = json.loads(responses.partition("data: ")[2])
    assert (event["code"], event["param"], event["sequence_number"]) == ("overloaded", "x", 2)
    assert event["error"] == error.envelope()["error"]
    messages = error_frame(error, Endpoint.MESSAGES, record)
    assert messages.startswith("event: error\n")
    event = json.loads(messages.partition("data: ")[2])
    assert (event["type"], event["error"]["type"]) == ("error", "rate_limit_error")
    assert event["request_id"] == "r1"


def test_descriptions_are_short() -> None:
    assert describe("x" * 1000) == "'" + "x" * 76 + "..."
    assert describe(list(range(1000))) == "an array of 1000 items"
    assert describe({"a": 1}) == "{'a': 1}"


def test_log_lines_carry_the_request_id() -> None:
    record = logging.LogRecord("server.x", logging.INFO, "f", 1, "hello %s", ("you",), None)
    token = request_id_var.set("rid-1")
    try:
        assert TextFormatter().format(record).endswith("server.x: hello you [rid-1]")
        entry = json.loads(JsonFormatter().format(record))
    finally:
        request_id_var.reset(token)
    assert entry["message"] == "hello you"
    assert entry["request_id"] == "rid-1"
    assert "request_id" not in json.loads(JsonFormatter().format(record))


# ----------------------------------------------------------------------------------------- contract
# A failure here means that the vLLM pin moved: read what changed before adapting the server.
def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


_IMPORTS = """
import sys
from server.engine.launch import import_serving
name = "vllm.entrypoints.launchers.api_server.app_state"
assert name not in sys.modules
import_serving()
assert name in sys.modules
assert "vllm.entrypoints.pooling.scoring.protocol" in sys.modules
"""


@pytest.mark.wide
def test_what_serves_is_imported_off_the_event_loop() -> None:
    # In a process of its own: here, other tests have imported it all.
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_signatures_of_what_serves() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.pooling.classify.serving import ServingClassification
    from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
    from vllm.entrypoints.pooling.pooling.serving import ServingPooling
    from vllm.entrypoints.pooling.scoring.serving import ServingScores
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

    serve = ["self", "request", "raw_request"]
    assert parameters(OpenAIServingChat.create_chat_completion) == serve
    assert parameters(OpenAIServingCompletion.create_completion) == serve
    assert parameters(OpenAIServingResponses.create_responses) == serve
    assert parameters(AnthropicServingMessages.create_messages) == serve
    assert parameters(AnthropicServingMessages.count_tokens) == serve
    assert parameters(ServingTokenization.create_tokenize) == serve
    assert parameters(ServingTokenization.create_detokenize) == serve
    assert parameters(OpenAIServingModels.show_available_models) == ["self"]
    assert parameters(OpenAIServingModels.is_base_model) == ["self", "model_name"]
    for serving in (ServingClassification, ServingEmbedding, ServingPooling):
        assert parameters(serving.__call__) == serve
    assert parameters(ServingScores.__call__) == ["self", "args", "kwargs"]


def test_where_adapters_are_looked_up() -> None:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing

    # The lookups that `server.vllm.engine_client.LeasedNames` answers; other readers list names.
    lookups = inspect.getsource(BaseServing._maybe_get_adapters)
    assert "self.models.lora_requests[request.model]" in lookups
    assert "self.lora_requests.values()" in inspect.getsource(
        OpenAIServingModels.show_available_models
    )


def test_what_the_watch_and_the_meter_ask() -> None:
    from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.output_processor import RequestState

    assert parameters(AsyncLLM.is_sleeping) == ["self"]
    assert MaxQueuedTokensError().http_status == QueueOverflowError().http_status == 503
    state = parameters(RequestState.__init__)
    assert {"parent_req", "queue", "detokenizer", "prompt_token_ids"} <= set(state)
    assert parameters(IncrementalDetokenizer.num_output_tokens) == ["self"]


def test_what_the_grammar_gate_stands_on() -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.request import get_structured_output_key

    # Without a configuration there is nothing to validate against, whatever the grammar.
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(("))
    params._validate_structured_outputs(None, None, None)
    text = get_structured_output_key(StructuredOutputsParams(json={"a": 1}))[1]
    assert text == '{"a": 1}'
    assert parameters(StructuredOutputManager.grammar_init) == ["self", "request"]


def test_where_answers_are_parsed() -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    streams = parameters(OpenAIServingChat.chat_completion_stream_generator)
    assert streams[:3] == ["self", "request", "result_generator"]
    assert "parser" in parameters(OpenAIServingChat.chat_completion_full_generator)
    # Parsers are made in the order of the choices, and each reads its own outputs.
    source = inspect.getsource(OpenAIServingChat.chat_completion_stream_generator)
    assert "for _ in range(num_choices)" in source
    assert "parser = parsers[i]" in source
    events = parameters(OpenAIServingResponses._process_simple_streaming_events)
    start = ["self", "request", "sampling_params", "result_generator", "context"]
    assert events[:5] == start
    assert events[-1] == "_increment_sequence_number_and_return"
    assert parameters(OpenAIServingResponses.responses_full_generator)[:5] == start
    assert parameters(DelegatingParser.parse)[1:] == [
        *"model_output request enable_auto_tools model_output_token_ids".split()
    ]
    assert parameters(Hermes2ProToolParser._extract_tool_name) == ["tc_json"]
    assert parameters(Hermes2ProToolParser._extract_tool_args) == ["tc_json", "is_complete"]


def test_errors_of_the_hub_have_the_names_that_are_known() -> None:
    from huggingface_hub import errors

    from server.engine.config import _HUB_ERRORS

    assert [name for name in sorted(_HUB_ERRORS) if not hasattr(errors, name)] == []
    assert errors.StrictDataclassError.__name__.startswith("StrictDataclass")


def test_every_refused_flag_exists_and_no_flag_of_ours_hides_an_engine_flag() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from server.settings import ServerSettings
    from server.vllm.flag_table import FULFILLED_FLAGS, REFUSED_FLAGS, RENAMED_FLAGS

    theirs = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions}
    assert {*REFUSED_FLAGS, *RENAMED_FLAGS, *FULFILLED_FLAGS} <= theirs
    assert not REFUSED_FLAGS.keys() & {*RENAMED_FLAGS, *FULFILLED_FLAGS}
    assert set(RENAMED_FLAGS.values()) <= set(ServerSettings.model_fields)
    assert {"numa_bind", "lora_modules", "otlp_traces_endpoint", "load_format"} <= theirs
    ours = set(ServerSettings.model_fields)
    assert not ours & set(AsyncEngineArgs.__dataclass_fields__)
    # What means the same in both.
    assert ours & theirs == {
        *"host port root_path api_key enable_ssl_refresh".split(),
        *"ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers".split(),
        *"allowed_origins allowed_methods allowed_headers allow_credentials".split(),
        "uds",
        "headless",
    }


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["m", "--h11-max-header-count", "9"], "cannot be used: --max-header-bytes bounds"),
        (["m", "--enable-prompt-embeds"], "--enable-prompt-embeds cannot be used: prompts are"),
        (["m", "--api-server-count", "2"], "cannot be used: a server has one HTTP process; run"),
        (["m", "--no-such-flag"], "command line is wrong"),
        # The server's own parser takes it in full alone; vLLM's would take it and check nothing.
        (["m", "--api-k", "sk-secret"], "--api-key must be written in full"),
        (["m", "--allowed-orig", '["x"]'], "--allowed-origins must be written in full"),
        (["/no/such/model"], "'/no/such/model'"),
        (["m", "--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(argv: list[str], words: str) -> None:
    from server.frontend import LaunchError
    from server.settings import ServerSettings
    from server.vllm.flags import parse_arguments

    with pytest.raises(LaunchError) as caught:
        parse_arguments(argv, ServerSettings())
    assert caught.value.exit_code == 2
    assert words in str(caught.value)


def test_flags_of_manifests_for_vllm_are_honoured(
    checkpoints: CheckpointCache, caplog: pytest.LogCaptureFixture
) -> None:
    from server.observability.logging import FIELDS, REQUEST_LOGGER
    from server.settings import ServerSettings
    from server.vllm.flags import parse_arguments

    level = logging.getLogger("uvicorn").level
    requests = logging.getLogger(REQUEST_LOGGER)
    words = "--uvicorn-log-level error --enable-server-load-tracking --api-server-count 1"
    some = ("--disable-access-log-for-endpoints", "/health, /tokenize")

    def logged(route: str) -> bool:
        caplog.clear()
        # Whatever level an earlier test of this process has left.
        with caplog.at_level(logging.INFO, REQUEST_LOGGER):
            requests.info("GET", extra={FIELDS: {"route": route}})
            requests.error("failed")
        assert "failed" in caplog.text
        return "GET" in caplog.text

    try:
        with caplog.at_level(logging.INFO):
            parse_arguments([str(checkpoints("llama")), *words.split(), *some], ServerSettings())
        assert "--disable-access-log-for-endpoints: finished requests" in caplog.text
        assert logging.getLogger("uvicorn").level == logging.ERROR
        assert [logged(route) for route in ("/tokenize", "/health", "/v1/models")] == [0, 0, 1]
        flags = [str(checkpoints("llama")), "--disable-uvicorn-access-log"]
        parse_arguments(flags, ServerSettings())
        assert not logged("/v1/models")
    finally:
        logging.getLogger("uvicorn").setLevel(level)
        requests.filters.clear()


def test_vllm_starts_engines_the_way_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.utils.system_utils import get_mp_context

    from server.vllm.patches import choose_start_method

    # An engine in this process, as other tests make, freezes the variables' values.
    envs.disable_envs_cache()
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setitem(envs.environment_variables, name, envs.environment_variables[name])
    for method in ("forkserver", "spawn"):
        choose_start_method(method)
        context = get_mp_context()
        assert context is multiprocessing.get_context(method)
