"""Rejected uploads and batches, all against one service.

The service handles signals by its event loop, so that no other loop may run in this module: the
end of another one would leave the signal that stops this service to the process.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.server.scripted import Running, running
from tests.server.storage.batch_clients import (
    ANCHOR,
    CHAT,
    FILE,
    FORM,
    PURPOSE,
    SECONDS,
    create,
    form,
    line,
    text_of,
    until_ended,
    upload,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    settings = {"max_file_bytes": 8192, "max_batch_lines": 10, "max_body_bytes": 4096}
    async with running(folder, data_dir=folder / "data", **settings) as started:
        yield started


def contents(service: Running) -> list[Path]:
    """Return the paths of stored files and of parts."""
    return sorted((service.run_dir / "data").glob("*/*"))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("kind", "body", "status", "code", "param"),
    [
        ("application/json", b"{}", 415, "unsupported_media_type", None),
        ("multipart/form-data", b"{}", 415, "unsupported_media_type", None),
        (FORM, form(PURPOSE), 400, "missing_field", "file"),
        (FORM, form(FILE), 400, "missing_field", "purpose"),
        (FORM, form(FILE, ('name="purpose"', "fine-tune")), 400, "invalid_value", "purpose"),
        (FORM, form(FILE, PURPOSE, ('name="porpoise"', "x")), 400, "unknown_field", "porpoise"),
        (FORM, form(FILE, FILE, PURPOSE), 400, "invalid_value", "file"),
        (FORM, form(('name="other"; filename="f"', "")), 400, "invalid_value", "other"),
        (FORM, form(FILE, PURPOSE)[:-20], 400, "invalid_value", "file"),
        (FORM, b"nothing of the kind", 400, "invalid_value", "file"),
        (FORM, form(('name="purpose"', "x" * 9000)), 400, "invalid_value", "purpose"),
        (FORM, form(PURPOSE, (FILE[0], "x" * 9000)), 413, "body_too_large", None),
        (FORM, form(FILE, PURPOSE, (SECONDS, "7200")), 400, "invalid_value", "expires_after"),
        *(
            (
                FORM,
                form(FILE, PURPOSE, ANCHOR, (SECONDS, digits)),
                400,
                "invalid_value",
                "expires_after",
            )
            for digits in ("000000007200999999999999", "9" * 4000, "7_200", "²")
        ),
        (
            f"multipart/form-data; boundary={'b' * 5000}",
            form(FILE, PURPOSE),
            415,
            "unsupported_media_type",
            None,
        ),
    ],
)
async def test_wrong_form_stores_no_file(
    service: Running, kind: str, body: bytes, status: int, code: str, param: str | None
) -> None:
    before = contents(service)
    headers = {"content-type": kind}
    answer = await service.client.post("/v1/files", content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert contents(service) == before


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([], "empty_file", None),
        ([b"\n\n"], "empty_file", None),
        ([line(1), b"{not json}\n"], "invalid_json_line", 2),
        ([line(1), b"[1]\n"], "invalid_json_line", 2),
        ([line(1), line(1)], "duplicate_custom_id", 2),
        ([line(1, custom_id="")], "invalid_custom_id", 1),
        ([line(1, method="GET")], "invalid_method", 1),
        ([line(1, url="/v1/completions")], "mismatched_url", 1),
        ([line(1, body=None)], "invalid_body", 1),
        ([line(1, bodi={})], "unknown_field", 1),
        ([line(1), line(2, body={"model": 5})], "invalid_model", 2),
        ([line(n) for n in range(12)], "too_many_tasks", None),
        ([line(1), b'{"custom_id": "' + b"x" * 5000 + b'"}\n', line(2)], "line_too_long", 2),
    ],
)
async def test_wrong_input_fails_the_batch(
    service: Running, lines: list[Any], code: str, number: int | None
) -> None:
    batch = await until_ended(service.client, await create(service.client, lines))
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == (code, number)
    assert error["message"]
    assert batch["output_file_id"] is None
    # No line was sent.
    assert service.frontend.headers == {}


@pytest.mark.asyncio(loop_scope="module")
async def test_each_line_with_the_name_of_an_earlier_one_is_named(service: Running) -> None:
    lines = [line(2), line(1), line(2), line(1, method="GET"), line(1), line(2)]
    batch = await until_ended(service.client, await create(service.client, lines))
    found = [(error["code"], error["line"]) for error in batch["errors"]["data"]]
    duplicate = "duplicate_custom_id"
    assert found == [(duplicate, 3), ("invalid_method", 4), (duplicate, 5), (duplicate, 6)]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"endpoint": "/v1/messages"}, "invalid_value", "endpoint"),
        ({"completion_window": "1h"}, "invalid_value", "completion_window"),
        ({"input_file_id": "file-none"}, "not_found", "input_file_id"),
        ({"input_file_id": 5}, "invalid_type", "input_file_id"),
        ({"metadata": {"a": "x" * 600}}, "invalid_value", "metadata"),
        ({"metdata": {}}, "unknown_field", "metdata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            "invalid_type",
            "output_expires_after",
        ),
    ],
)
async def test_wrong_body_makes_no_batch(
    service: Running, change: dict[str, Any], code: str, param: str
) -> None:
    body = {
        "input_file_id": await upload(service.client, text_of([line(1)])),
        "endpoint": CHAT,
        "completion_window": "24h",
        **change,
    }
    answer = await service.client.post("/v1/batches", json=body)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
