"""Bodies become vLLM's request models, or one short refusal, in time that grows with their size."""

import ast
import gc
import json
import multiprocessing
import pickle
import resource
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import FrozenInstanceError, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm.entrypoints.openai.responses.utils import construct_input_messages

from server.errors import (
    ContextLengthError,
    InternalError,
    InvalidJsonError,
    InvalidTypeError,
    InvalidValueError,
    MissingFieldError,
    ReaderFailedError,
    ServerError,
    UnknownFieldError,
    UnsupportedFieldError,
    UnsupportedOperationError,
)
from server.frontend import ParsedRequest
from server.host.job_pool import JobPool
from server.request.options import TemplateVariables, ThinkingSupport
from server.request.sizes import MAX_FIELDS, RequestLimits, check_sizes
from server.settings import ServerSettings
from server.tools import NO_CALLS, ToolSupport
from server.vllm.models import request_models
from server.vllm.reading import (
    BodyReader,
    RequestReader,
    RequestRules,
    _fail_fast_validator,
    get_answer,
    is_small,
    job_bytes,
    serve_reading,
)
from server.wire import Endpoint
from tests.edges.corpus import BODIES, USER, endpoint_of
from tests.server.request.limits import LIMITS

ROOT = Path(__file__).parents[2]
MODELS = request_models()
_SIZES = {"max_messages": 2048, "max_prompts": 256, "max_tools": 256, "max_n": 8, "max_stop": 4}
_SIZES |= {"max_logit_bias": 1024, "max_model_len": 2048, "max_queued_tokens": 16384}
_MODEL = {"has_priorities": False, "text_only": True, "vocab_size": 500}
_READS = {"unknown_fields": "reject", "max_json_depth": 64, "merge_inline_system": False}
_TEMPLATE = {"own_templates": True, "thinking": ThinkingSupport(), "sampling": {}, "guided": True}
_TEMPLATE |= {"variables": TemplateVariables(arguments=frozenset(("tokenize",)))}
RULES = RequestRules(
    limits=RequestLimits(**_SIZES, **_MODEL),
    **_READS,
    **_TEMPLATE,
    tools=ToolSupport("template", None, "it names them"),
    rewrites_tools=True,
    speculates=True,
    offered=frozenset(MODELS) - {"rerank"},
    does="does other things",
)


@pytest.mark.engine
def test_tools_are_refused_where_nothing_shows_them() -> None:
    reader = BodyReader(replace(RULES, tools=NO_CALLS), MODELS)
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "m", "messages": [USER], "tools": tools}
    with pytest.raises(UnsupportedFieldError, match="'tools' is not supported") as caught:
        reader.read(Endpoint.CHAT, json.dumps(body).encode())
    assert caught.value.status == 400
    assert isinstance(
        reader.read(Endpoint.CHAT, json.dumps(body | {"tools": None}).encode()), ParsedRequest
    )


@pytest.fixture(scope="module")
def reader() -> BodyReader:
    return BodyReader(RULES, MODELS)


def raw(**body: Any) -> bytes:
    return json.dumps({"model": "m", **body}).encode()


@pytest.mark.engine
@pytest.mark.parametrize("form", sorted(RULES.offered))
def test_every_form_is_read_and_can_be_sent_between_processes(
    reader: BodyReader, form: str
) -> None:
    given = reader.read(endpoint_of(form), raw(**BODIES[form]))
    again = get_answer(pickle.dumps(given))
    assert again.answers == given.answers
    assert again.form == form
    assert again.model.model_dump() == given.model.model_dump()
    assert again.fields.get("model") == "m"
    assert not {"messages", "prompt", "input", "tools"} & again.fields.keys()


@pytest.mark.engine
def test_the_billing_line_leaves_requests_of_one_api(reader: BodyReader) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.37;"
    system = {"role": "system", "content": f"{line}\na"}
    for endpoint, content in ((Endpoint.CHAT, f"{line}\na"), (Endpoint.MESSAGES, "a")):
        given = reader.read(endpoint, raw(messages=[system, USER], max_tokens=5))
        assert given.model.messages[0]["content"] == content


@pytest.mark.engine
def test_parts_that_pydantic_reads_late_are_read_at_once(reader: BodyReader) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("user", "developer", "assistant", "system"):
        said = {"role": role, "content": parts}
        given = reader.read(Endpoint.CHAT, raw(messages=[said]))
        assert given.model.messages[0]["content"] == parts
        wrong = {"role": role, "content": [parts[0], 5]}
        with pytest.raises(InvalidTypeError) as caught:
            reader.read(Endpoint.CHAT, raw(messages=[wrong]))
        assert str(caught.value.param).startswith("messages[0].content")


REFUSALS: list[tuple[Endpoint, dict[str, Any], type[ServerError], str | None]] = [
    (Endpoint.RESPONSES, {"input": [{}] * 2000}, MissingFieldError, "input[0].type"),
    (Endpoint.RESPONSES, {"input": "x", "tools": [{}] * 250}, MissingFieldError, "tools[0].name"),
    (Endpoint.MESSAGES, {"messages": [{"role": "user", "content": [{}] * 9000}], "max_tokens": 1},
     InvalidTypeError, "messages[0].content"),
    (Endpoint.CHAT, {"messages": [{"role": "user", "content": [{}] * 300}]},
     MissingFieldError, "messages[0].content[0].text"),
    (Endpoint.CHAT, {"messages": [{"role": 1, "content": "x"}] * 300},
     InvalidValueError, "messages[0].role"),
    (Endpoint.CHAT, {"messages": [USER], "zzz" * 100_000: 1}, UnknownFieldError, "zzz"),
    (Endpoint.CHAT, {"messages": [USER], "length_penalty": 2.0}, ServerError, "length_penalty"),
    (Endpoint.DETOKENIZE, {"tokens": [5], "modalities": 0.0}, UnsupportedFieldError, "modalities"),
    (Endpoint.RERANK, {"query": "a"}, UnsupportedOperationError, None),
    *((endpoint, {**body, "structured_outputs": value}, InvalidTypeError, "structured_outputs")
      for endpoint, body in ((Endpoint.CHAT, BODIES["chat"]),
                             (Endpoint.COMPLETION, BODIES["completion"]))
      for value in (1, "text", [], True, 0.5)),
]  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize(("endpoint", "body", "error", "param"), REFUSALS)
def test_what_is_wrong_is_told_briefly(
    reader: BodyReader,
    endpoint: Endpoint,
    body: dict[str, Any],
    error: type[ServerError],
    param: str | None,
) -> None:
    with pytest.raises(error) as caught:
        reader.read(endpoint, raw(**body))
    assert caught.value.status == 400
    assert param is None or str(caught.value.param).startswith(param)
    assert len(caught.value.body()) < 4096


@pytest.mark.engine
def test_the_number_of_complaints_does_not_grow_with_the_number_of_entries(
    reader: BodyReader,
) -> None:
    from pydantic import ValidationError

    counts = []
    for number in (10, 1000):
        with pytest.raises(ValidationError) as caught:
            _fail_fast_validator(reader._models["responses"]).validate_json(
                raw(input=[{}] * number), strict=True
            )
        counts.append(caught.value.error_count())
    assert counts[0] == counts[1] < 1000


@pytest.fixture
async def pool() -> AsyncIterator[JobPool]:
    def start(pipe: Connection) -> BaseProcess:
        # Servers have a fork server, which would import vLLM here.
        process = multiprocessing.get_context("fork").Process(
            target=serve_reading, args=(pipe, RULES, ServerSettings()), name="reading", daemon=True
        )
        process.start()
        return process

    others = multiprocessing.active_children()
    yield JobPool("reading", start, size=1, timeout_s=20)
    for process in set(multiprocessing.active_children()) - set(others):
        process.kill()
        process.join(5)


class Nowhere:
    """Reads nothing: what comes here was taken for small."""

    def read(self, endpoint: Endpoint, raw: bytes, before: bytes | None = None) -> ParsedRequest:
        raise AssertionError(f"{endpoint}: {len(raw)} bytes")


@pytest.mark.engine
async def test_large_bodies_are_read_in_a_process(pool: JobPool) -> None:
    reader = RequestReader(Nowhere(), pool)
    given = await reader.read(Endpoint.CHAT, raw(messages=[USER] * 2000))
    assert given.is_large
    assert len(given.model.messages) == 2000
    with pytest.raises(InvalidValueError, match="at most 2048 items"):
        await reader.read(Endpoint.CHAT, raw(messages=[USER] * 2049))
    with pytest.raises(MissingFieldError, match="content"):
        await reader.read(Endpoint.CHAT, raw(messages=[{"role": "user"}] * 2000))
    (first,) = (one for one in multiprocessing.active_children() if one.name == "reading")
    first.kill()
    with pytest.raises(ReaderFailedError, match="ended by SIGKILL before it had read") as caught:
        while True:
            await reader.read(Endpoint.CHAT, raw(messages=[USER] * 2000))
    assert caught.value.status == 503
    assert "retry-after" in caught.value.headers
    again = await reader.read(Endpoint.CHAT, raw(messages=[USER] * 2000))
    assert again.answers == 1


@pytest.mark.engine
@pytest.mark.parametrize(
    ("content", "small"),
    [
        (b"{}", True),
        (b'"' + b"x" * 30_000 + b'"', True),
        (b'"' + b"x" * 40_000 + b'"', False),
        (b"[{}]" * 80, True),
        (b"[{}]" * 90, False),
    ],
)
def test_small_bodies_are_few_bytes_with_few_containers(content: bytes, small: bool) -> None:
    assert is_small(content) is small


@pytest.mark.engine
def test_jobs_and_answers_survive_the_way(reader: BodyReader) -> None:
    assert job_bytes(Endpoint.CHAT, b"{\n}", None, "id") == b"CHAT -1 id\n{\n}"
    assert job_bytes(Endpoint.CHAT, b"{\n}", b"[]", "id") == b"CHAT 2 id\n[]{\n}"
    given = reader.read(Endpoint.CHAT, raw(messages=[USER]))
    assert get_answer(pickle.dumps(given)).model.messages == [USER]
    with pytest.raises(FrozenInstanceError):
        given.answers = 0  # type: ignore[misc]
    refused = MissingFieldError("The field 'x' is missing.", param="x")
    with pytest.raises(MissingFieldError) as caught:
        get_answer(pickle.dumps(refused))
    assert (caught.value.message, caught.value.param) == (refused.message, "x")


@pytest.mark.engine
def test_the_body_reader_alone_makes_parsed_requests() -> None:
    makers = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "server").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ParsedRequest")
    ]
    assert makers == ["server/vllm/reading.py"]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = CALL["function"]


def said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a", **fields}


def called(**fields: Any) -> dict[str, Any]:
    return said(tool_calls=[{k: v for k, v in {**CALL, **fields}.items() if v != "absent"}])


def function(**fields: Any) -> dict[str, Any]:
    return called(function={k: v for k, v in {**FUNCTION, **fields}.items() if v != "absent"})


WRONG_MESSAGES = [
    *((said(tool_calls=value), "invalid_type", "tool_calls") for value in ({}, "", 5, True, "x")),
    *((said(tool_calls=[value]), "invalid_type", "tool_calls[0]") for value in (5, None, "x", [])),
    *((called(id=value), "missing_field", "tool_calls[0].id") for value in (None, "absent")),
    (called(id=5), "invalid_type", "tool_calls[0].id"),
    *((called(type=value), "missing_field", "tool_calls[0].type") for value in (None, "absent")),
    (called(type="x"), "invalid_value", "tool_calls[0].type"),
    (called(function=None), "missing_field", "tool_calls[0].function"),
    (called(function="f"), "invalid_type", "tool_calls[0].function"),
    (function(name=None), "missing_field", "tool_calls[0].function.name"),
    (function(name=5), "invalid_type", "tool_calls[0].function.name"),
    (function(arguments={"a": 1}), "invalid_type", "tool_calls[0].function.arguments"),
    *((said(**{name: value}), "invalid_type", name)
      for name in ("name", "refusal", "reasoning", "reasoning_content") for value in (5, [], True)),
    ({"role": "tool", "tool_call_id": 5, "content": "x"}, "invalid_type", "tool_call_id"),
    *(({"role": role, "content": value}, "invalid_type", "content")
      for role in ("user", "system", "assistant", "tool") for value in ({"type": "text"}, 5, True)),
    ({"role": "user", "content": None}, "missing_field", "content"),
    ({"role": "user", "content": [5]}, "invalid_type", "content[0]"),
]  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize(("message", "code", "field"), WRONG_MESSAGES)
def test_errors_of_a_message_name_the_field(
    reader: BodyReader, message: dict[str, Any], code: str, field: str
) -> None:
    for endpoint in (Endpoint.CHAT, Endpoint.RENDER_CHAT, Endpoint.TOKENIZE):
        with pytest.raises(ServerError) as caught:
            reader.read(endpoint, raw(messages=[USER, message]))
        assert (caught.value.code, caught.value.param) == (code, f"messages[1].{field}")
        assert f"'messages[1].{field}'" in caught.value.message
        assert not any(word in caught.value.message for word in ("None", "dictionary", "True"))


@pytest.mark.engine
def test_null_in_a_message_is_as_absent(reader: BodyReader) -> None:
    names = ("name", "refusal", "reasoning", "reasoning_content", "tool_calls", "tool_call_id")
    message = said(**dict.fromkeys(names))
    read = reader.read(Endpoint.CHAT, raw(messages=[USER, message]))
    assert read.model.messages[1] == said()
    for call in (function(arguments=None), function(arguments="absent")):
        read = reader.read(Endpoint.CHAT, raw(messages=[USER, call]))
        assert read.model.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": ""}
    for content in ({}, {"content": None}):
        result = {"role": "tool", "tool_call_id": "1", **content}
        read = reader.read(Endpoint.CHAT, raw(messages=[USER, called(), result]))
        assert read.model.messages[2]["content"] == ""


TEXT = {"type": "output_text", "text": "one", "annotations": []}
ANSWER = {"type": "message", "id": "m", "status": "completed", "role": "assistant"}
ITEMS = Endpoint.RESPONSES, Endpoint.INPUT_TOKENS, Endpoint.COMPACT


@pytest.mark.engine
@pytest.mark.parametrize(
    ("item", "text"),
    [
        (ANSWER | {"content": [TEXT, {"type": "output_text", "text": "two"}]}, "one\ntwo"),
        (ANSWER | {"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        (ANSWER | {"content": [TEXT, {"type": "refusal", "refusal": "no"}]}, "one\nno"),
        (ANSWER | {"content": []}, ""),
        (ANSWER | {"content": "one"}, "one"),
        (ANSWER | {"content": [TEXT], "status": None, "id": None, "phase": None}, "one"),
        (ANSWER | {"content": [TEXT | {"annotations": None, "logprobs": None}]}, "one"),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "one"}]}, "one"),
        ({"role": "assistant", "type": None, "content": [TEXT, TEXT]}, "one\none"),
        ({"role": "assistant", "content": [{"type": "input_text", "text": "a"}] * 2}, "a\na"),
        ({"role": "assistant", "content": None}, ""),
    ],
)
def test_all_text_of_an_answer_in_the_input_is_used(
    reader: BodyReader, item: dict[str, Any], text: str
) -> None:
    for endpoint in ITEMS:
        model: Any = reader.read(endpoint, raw(input=[USER, item, USER])).model
        (made,) = construct_input_messages(request_input=[model.input[1]])
        assert made == {"role": "assistant", "content": text}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("item", "code", "field"),
    [
        (5, "invalid_type", ""),
        (None, "invalid_type", ""),
        ({}, "missing_field", ".type"),
        ({"type": 5}, "invalid_type", ".type"),
        ({"type": "foo"}, "invalid_value", ".type"),
        ({"type": "item_reference", "id": "x"}, "invalid_value", ".type"),
        ({"type": "local_shell_call"}, "invalid_value", ".type"),
        ({"role": "tool", "content": "x"}, "invalid_value", ".role"),
        ({"role": None, "content": "x"}, "missing_field", ".role"),
        ({"role": "user", "content": {"type": "input_text"}}, "invalid_type", ".content"),
        ({"role": "user", "content": None}, "missing_field", ".content"),
        ({"role": "user", "content": [TEXT]}, "invalid_value", ".content[0].type"),
        (ANSWER | {"content": [{"type": "output_text"}]}, "missing_field", ".content[0].text"),
        (ANSWER | {"content": [TEXT, {"type": "foo"}]}, "invalid_value", ".content[1].type"),
        (ANSWER | {"content": [{"type": "refusal"}]}, "missing_field", ".content[0].refusal"),
        (ANSWER | {"content": [5]}, "invalid_type", ".content[0]"),
        (ANSWER | {"content": [TEXT], "status": "foo"}, "invalid_value", ".status"),
        (ANSWER | {"content": [TEXT | {"foo": 1}]}, "unknown_field", ".content[0].foo"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "missing_field", ".call_id"),
        ({"type": "function_call", "call_id": "1", "name": 5}, "invalid_type", ".name"),
        ({"type": "function_call_output", "call_id": "1"}, "missing_field", ".output"),
        ({"type": "function_call_output", "call_id": 5, "output": ""}, "invalid_type", ".call_id"),
        ({"type": "function_call_output", "call_id": "1", "output": {}}, "invalid_type", ".output"),
        ({"type": "compaction_trigger"}, "invalid_value", ""),
    ],
)
def test_errors_of_an_item_name_the_field(
    reader: BodyReader, item: object, code: str, field: str
) -> None:
    for endpoint in ITEMS:
        with pytest.raises(ServerError) as caught:
            reader.read(endpoint, raw(input=[USER, item, USER]))
        assert (caught.value.code, caught.value.param) == (code, f"input[1]{field}")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"messages": [{"role": "user", "content": "a\\ud83d"}]}', "messages[0].content"),
        (b'{"user": "\\udc00", "messages": []}', "user"),
        (b'{"metadata": {"\\ud83d": "x"}}', "metadata"),
        (b'{"prompt": ["\\ud83d\\ude00", "\\ud83dx"]}', "prompt[1]"),
        (b'{"prompt": "\\ud8"}', None),
    ],
)
def test_half_a_surrogate_pair_is_named(reader: BodyReader, body: bytes, path: str | None) -> None:
    with pytest.raises(InvalidJsonError) as caught:
        reader.read(Endpoint.CHAT, body)
    assert caught.value.param == path
    assert path is None or f"'{path}' has half of a surrogate pair" in caught.value.message


@pytest.mark.engine
@pytest.mark.parametrize("value", [{}, 5, True])
def test_an_input_that_is_no_list_is_refused(reader: BodyReader, value: object) -> None:
    for endpoint in ITEMS:
        with pytest.raises(InvalidTypeError) as caught:
            reader.read(endpoint, raw(input=value))
        assert caught.value.param == "input"


# -------------------------------------------------------------------------------------- field sizes
MESSAGE = {"role": "user", "content": "hi"}
LONG = "x" * ((1 << 20) + 1)


@pytest.mark.parametrize(
    ("endpoint", "body", "error", "param", "words"),
    [
        ("CHAT", {"messages": [MESSAGE] * 5}, InvalidValueError, "messages", "4 items .*got 5"),
        ("RESPONSES", {"input": [MESSAGE] * 5}, InvalidValueError, "input", "4 items .*got 5"),
        ("CHAT", {"messages": [{"content": [{}] * 64}]}, InvalidValueError, "messages", "than 64"),
        ("CHAT", {"messages": [{"content": LONG}]}, ContextLengthError, "messages", str(1 << 20)),
        ("CHAT", {"messages": [{LONG: 1}]}, ContextLengthError, "messages", "1048577 char"),
        ("COMPLETION", {"prompt": LONG}, ContextLengthError, "prompt", str(1 << 20)),
        ("COMPLETION", {"prompt": [5] * 101}, ContextLengthError, "prompt", "101 .* 100 fit"),
        ("COMPLETION", {"prompt": [[5], [5] * 101]}, ContextLengthError, "prompt[1]", "101"),
        ("EMBEDDINGS", {"input": [[5] * 101]}, ContextLengthError, "input[0]", "101"),
        ("COMPLETION", {"prompt": [[5]] * 4}, InvalidValueError, "prompt", "3 items .*got 4"),
        ("COMPLETION", {"prompt": [5, {"a": [1] * 512}]}, InvalidValueError, "prompt", "than 112"),
        ("COMPLETION", {"prompt": [[5, {"a": [1] * 512}]]}, InvalidValueError, "prompt", "than"),
        ("EMBEDDINGS", {"input": [5, LONG]}, ContextLengthError, "input", "1048577 char"),
        ("EMBEDDINGS", {"input": ["a"] * 4}, InvalidValueError, "input", "3 items .*got 4"),
        ("EMBEDDINGS", {"input": [MESSAGE] * 5}, InvalidValueError, "input", "4 items .*got 5"),
        ("EMBEDDINGS", {"messages": [[MESSAGE]] * 4}, InvalidValueError, "messages", "got 4"),
        ("RERANK", {"documents": ["b"] * 4}, InvalidValueError, "documents", "got 4"),
        ("COHERE_EMBED", {"texts": ["b"] * 4}, InvalidValueError, "texts", "got 4"),
        ("COHERE_EMBED", {"inputs": [{"content": []}] * 4}, InvalidValueError, "inputs", "got 4"),
        ("DETOKENIZE", {"tokens": [5] * 101}, InvalidValueError, "tokens", "100 items .*101"),
        ("CHAT", {"tools": [{}] * 3}, InvalidValueError, "tools", "2 items .* got 3"),
        ("CHAT", {"tools": [{"a": [1] * 512}]}, InvalidValueError, "tools", "than 512"),
        ("CHAT", {"allowed_token_ids": [1] * 51}, InvalidValueError, "allowed_token_ids", "50"),
        ("CHAT", {"bad_words": ["a"] * 257}, InvalidValueError, "bad_words", "256 items"),
        ("CHAT", {"stop": "a" * 1025}, InvalidValueError, "stop", "1024"),
        ("CHAT", {"user": "a" * 1025}, InvalidValueError, "user", "1025 characters"),
        ("CHAT", {"metadata": {"a": "b" * 70000}}, InvalidValueError, "metadata", "65536"),
        ("CHAT", {"unheard_of": [1] * 2000}, InvalidValueError, "unheard_of", "1024 items"),
        ("RESPONSES", {"prompt": {"a": [1] * 2000}}, InvalidValueError, "prompt", "than 1024"),
        ("CHAT", {str(i): 1 for i in range(MAX_FIELDS + 1)}, InvalidValueError, None, "257"),
    ],
)
def test_what_is_too_large_is_refused(
    endpoint: str, body: dict[str, Any], error: type[ServerError], param: str | None, words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        check_sizes(Endpoint[endpoint], body, LIMITS)
    assert type(caught.value) is error
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("CHAT", {"messages": [MESSAGE] * 4, "tools": [{}, {}], "n": 3}),
        ("CHAT", {"messages": "x" * (1 << 20)}),
        ("COMPLETION", {"prompt": [[5] * 100] * 3}),
        ("EMBEDDINGS", {"input": [5] * 400, "truncate_prompt_tokens": 10}),
        ("CHAT", {"logit_bias": {str(i): 1 for i in range(50)}}),
    ],
)
def test_what_is_not_passes(endpoint: str, body: dict[str, Any]) -> None:
    check_sizes(Endpoint[endpoint], body, LIMITS)
    # Texts are measured against the context.
    assert LIMITS.text_chars == 1 << 20
    assert replace(LIMITS, max_model_len=1 << 20).text_chars == 16 << 20


# --------------------------------------------------------------------------------------------- fuzz
# Random bodies of every form: read or refused, soon, in little memory, and never a fault of ours.
#
# Time is the processor's, so that a busy machine is no failure. `make test ARGS='-m wide'` tries
# many more than every run does.
MAX_CPU_S = 2.0
MAX_SMALL_CPU_S = 0.1
"""Of a body that is read on the event loop."""
MAX_GROWTH_BYTES = 512 << 20
MAX_BODY_BYTES = 4 << 20
FEW, MANY = 8, 1500

WORDS = (
    *"user assistant system tool text input_text function message auto".split(),
    *"required none json_schema json_object structural_tag image_url refusal".split(),
    *"function_call function_call_output reasoning tool_use tool_result ephemeral".split(),
)
NAMES = (
    *"role content type text name id tool_calls function arguments".split(),
    *"parameters schema json_schema strict call_id output input summary".split(),
    *"format properties items $ref enum anyOf pattern json regex".split(),
    *"choice grammar effort include_usage input_schema tool_use_id source".split(),
)
leaves = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -1e308, "", "a" * 3000]
    ),
    st.sampled_from(WORDS),
    st.text(max_size=8),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)
few = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=10,
)
many = st.builds(lambda value, number: [value] * number, few, st.sampled_from([2, 50, 3000]))
# Many of something, as the value of a field, in a list, or as a member of what lies in a list.
values = st.one_of(
    few,
    many,
    st.lists(st.one_of(few, many), max_size=3),
    st.lists(st.dictionaries(st.sampled_from(NAMES), st.one_of(few, many), max_size=4), max_size=2),
)


def bodies(form: str) -> st.SearchStrategy[dict[str, Any]]:
    """Valid bodies of a form, in which up to four fields hold anything."""
    names = sorted({*MODELS[form].model_fields, "unheard_of", "store", "functions"})
    wrong = st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=4)
    return wrong.map(lambda fields: {"model": "m", **BODIES[form], **fields})


@pytest.fixture(scope="module")
def fuzz_reader() -> Iterator[BodyReader]:
    # A full collection of what other tests left takes a second; it is no request's.
    gc.collect()
    gc.freeze()
    yield BodyReader(RULES, request_models())
    gc.unfreeze()


def attack(reader: BodyReader, form: str, number: int) -> None:
    """Read so many random bodies of a form; many are measured, which needs a quiet machine."""
    endpoint = endpoint_of(form)

    @settings(
        max_examples=number,
        derandomize=number == FEW,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(body=bodies(form))
    def one(body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        if len(raw) > MAX_BODY_BYTES:
            return
        started = time.thread_time()
        try:
            assert isinstance(reader.read(endpoint, raw), ParsedRequest)
        except ServerError as error:
            assert not isinstance(error, InternalError)
            assert 400 <= error.status < 500
            assert len(error.body()) < 4096
        seconds = time.thread_time() - started
        limit = MAX_SMALL_CPU_S if is_small(raw) else MAX_CPU_S
        assert number == FEW or seconds < limit, raw[:200]

    # What is imported or built for the first request of a form is no request's.
    reader.read(endpoint, json.dumps({"model": "m", **BODIES[form]}).encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert number == FEW or grown < MAX_GROWTH_BYTES


@pytest.mark.engine
@pytest.mark.parametrize("form", sorted(RULES.offered))
def test_random_bodies_are_read_or_refused(fuzz_reader: BodyReader, form: str) -> None:
    attack(fuzz_reader, form, FEW)


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", sorted(RULES.offered))
def test_many_random_bodies_are_read_or_refused(fuzz_reader: BodyReader, form: str) -> None:
    attack(fuzz_reader, form, MANY)
