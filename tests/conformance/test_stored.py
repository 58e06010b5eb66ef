"""What is stored: files, batches over them, and responses; and how each of them is refused."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.target import TIMEOUT_S, absent, error_of

COMPLETIONS = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
NOT_THERE = (404, 405, 501)
"""What a server answers that has no such route, or was started without a store."""


def line(model: str, name: str = "a", **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": "hi", "max_tokens": 4, **more}
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body}


def text_of(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


@pytest.fixture(autouse=True)
def has_files(http: httpx.Client, request: pytest.FixtureRequest) -> None:
    if "response" not in request.fixturenames and http.get("/v1/files").status_code in NOT_THERE:
        absent("/v1/files")


@pytest.fixture
def file(client: openai.OpenAI, model: str) -> Any:
    """A file of one line that is right."""
    return client.files.create(file=("in.jsonl", text_of(line(model))), purpose="batch")


@pytest.fixture
def response(client: openai.OpenAI, model: str) -> Any:
    """A response that is kept."""
    try:
        made = client.responses.create(model=model, input="hi", max_output_tokens=4, store=True)
        return client.responses.retrieve(made.id)
    except openai.APIStatusError as error:
        if error.status_code in (400, *NOT_THERE):
            absent("stored responses")
        raise


def wish(file: str, **more: Any) -> dict[str, Any]:
    ask = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    return ask | more


def run(client: openai.OpenAI, content: bytes) -> Any:
    """Return the batch of a file, ended."""
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(**wish(file.id))
    until = time.monotonic() + TIMEOUT_S
    while batch.status not in ENDED:
        assert time.monotonic() < until, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines_of(client: openai.OpenAI, file: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in client.files.content(file).text.splitlines()]


def is_refused(answer: httpx.Response, status: int, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = error_of(answer)
    assert isinstance(error["code"], str)
    assert error["param"] == param


def test_a_file_has_the_documented_form(client: openai.OpenAI, model: str, file: Any) -> None:
    content = text_of(line(model))
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "in.jsonl")
    assert file.bytes == len(content)
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert file.id in [one.id for one in client.files.list()]
    assert client.files.delete(file.id).deleted


def test_a_batch_has_the_documented_form(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    batch = run(client, text_of(line(model, "a"), line(model, "b")))
    assert (batch.object, batch.status, batch.errors) == ("batch", "completed", None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (2, 2, 0)
    answers = {one["custom_id"]: one for one in lines_of(client, batch.output_file_id)}
    assert sorted(answers) == ["a", "b"]
    for answer in answers.values():
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
        assert answer["response"]["body"]["object"] == "text_completion"
    assert batch.id in [one.id for one in client.batches.list()]
    # One that has ended cannot be cancelled.
    answer = http.post(f"/v1/batches/{batch.id}/cancel")
    assert answer.status_code in (400, 409), answer.text
    error_of(answer)


def test_a_line_that_is_refused_is_in_the_error_file(client: openai.OpenAI, model: str) -> None:
    batch = run(client, text_of(line(model, "good"), line(model, "bad", temperature=-1)))
    assert (batch.status, batch.request_counts.failed) == ("completed", 1)
    [answer] = lines_of(client, batch.error_file_id)
    assert answer["custom_id"] == "bad"
    assert answer["response"]["status_code"] == 400
    assert answer["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (lambda good: text_of(good) + b"{no json\n", 2),
        (lambda good: text_of(good, {**good, "custom_id": "b", "method": "GET"}), 2),
        (lambda good: text_of({**good, "url": "/v1/embeddings"}), 1),
        (lambda good: text_of(good, good), 2),
        (lambda good: b"\n", None),
    ],
    ids=["no JSON", "method", "url", "custom_id twice", "no lines"],
)
def test_a_bad_file_fails_its_batch_and_says_where(
    client: openai.OpenAI, model: str, spoil: Callable[[dict[str, Any]], bytes], number: int | None
) -> None:
    batch = run(client, spoil(line(model)))
    assert batch.status == "failed"
    assert batch.output_file_id is None
    first = batch.errors.data[0]
    assert first.line == number
    assert first.code
    assert first.message


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files/file-nowhere"),
        ("GET", "/v1/files/file-nowhere/content"),
        ("DELETE", "/v1/files/file-nowhere"),
        ("GET", "/v1/batches/batch_nowhere"),
        ("POST", "/v1/batches/batch_nowhere/cancel"),
    ],
)
def test_what_is_not_there_is_not_found(http: httpx.Client, method: str, path: str) -> None:
    name = "file_id" if "files" in path else "batch_id"
    is_refused(http.request(method, path), 404, name)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
@pytest.mark.parametrize("limit", ["0", "many"])
def test_a_wrong_limit_is_a_400(http: httpx.Client, path: str, limit: str) -> None:
    is_refused(http.get(path, params={"limit": limit}), 400, "limit")


def test_an_upload_of_another_purpose_or_without_a_file_is_a_400(http: httpx.Client) -> None:
    answer = http.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "nonsense"})
    is_refused(answer, 400, "purpose")
    is_refused(http.post("/v1/files", files={"purpose": (None, "batch")}), 400, "file")


@pytest.mark.parametrize(
    ("field", "value"),
    [("endpoint", "/v1/models"), ("completion_window", "1h"), ("metadata", {"a": "x" * 513})],
    ids=["endpoint", "completion_window", "metadata"],
)
def test_a_batch_of_a_wrong_value_is_a_400(
    http: httpx.Client, file: Any, field: str, value: object
) -> None:
    is_refused(http.post("/v1/batches", json=wish(file.id, **{field: value})), 400, field)
    answer = http.post("/v1/batches", json=wish("file-nowhere"))
    is_refused(answer, answer.status_code if answer.status_code == 404 else 400, "input_file_id")


def test_a_response_is_kept_until_it_is_deleted(client: openai.OpenAI, response: Any) -> None:
    assert response.object == "response"
    items = client.responses.input_items.list(response.id).data
    assert [item.type for item in items] == ["message"]
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_response_goes_on_from_another(client: openai.OpenAI, model: str, response: Any) -> None:
    again = client.responses.create(
        model=model, input="and?", max_output_tokens=4, previous_response_id=response.id
    )
    assert again.previous_response_id == response.id
    assert again.usage is not None
    assert again.usage.input_tokens > response.usage.input_tokens


@pytest.mark.parametrize(
    ("method", "rest"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
def test_a_response_that_is_not_there_is_not_found(
    http: httpx.Client, response: Any, method: str, rest: str
) -> None:
    answer = http.request(method, f"/v1/responses/resp_nowhere{rest}")
    is_refused(answer, 404, "response_id")


def test_a_response_that_is_not_there_is_not_gone_on_from(
    http: httpx.Client, model: str, response: Any
) -> None:
    ask = {"model": model, "input": "hi", "previous_response_id": "resp_nowhere"}
    answer = http.post("/v1/responses", json=ask)
    is_refused(
        answer, answer.status_code if answer.status_code == 404 else 400, "previous_response_id"
    )


def test_a_response_of_the_background_needs_the_store_and_no_other_is_cancelled(
    http: httpx.Client, model: str, response: Any
) -> None:
    ask = {"model": model, "input": "hi", "background": True, "store": False}
    is_refused(http.post("/v1/responses", json=ask), 400, "background")
    answer = http.post(f"/v1/responses/{response.id}/cancel")
    assert answer.status_code == 400, answer.text
    error_of(answer)
