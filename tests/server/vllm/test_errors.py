"""The table of errors, the log's forms and the harmlessness of what is described."""

from __future__ import annotations

import json
import logging

from server.errors import OverloadedError, ServerError, describe
from server.http.middleware import error_frame
from server.observability.logging import JsonFormatter, TextFormatter, request_id_var
from server.observability.metrics import OUTCOMES
from server.request.endpoints import route_of
from server.request.record import RequestRecord
from server.wire import Endpoint


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
    record = RequestRecord(route_of("/v1/responses"), "POST", 0.0, request_id="r1")
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
