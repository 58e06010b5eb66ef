"""HTTP client functions for tests of batches."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx

from tests.server.scripted import Running

CHAT = "/v1/chat/completions"
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def line(number: int, do: str = "answer", **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "do": do}
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body, **fields}


def text_of(lines: Sequence[Any]) -> bytes:
    """JSON lines; what is bytes already stays as it is."""
    return b"".join(
        one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines
    )


async def upload(client: httpx.AsyncClient, content: bytes, **headers: str) -> str:
    files = {"file": ("in.jsonl", content), "purpose": (None, "batch")}
    answer = await client.post("/v1/files", files=files, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def create(client: httpx.AsyncClient, lines: Sequence[Any], **fields: Any) -> dict[str, Any]:
    body = {
        "input_file_id": await upload(client, text_of(lines)),
        "endpoint": CHAT,
        "completion_window": "24h",
        **fields,
    }
    answer = await client.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def shown(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/batches/{batch['id']}")).json()
    return found


async def until_ended(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while batch["status"] in OPEN:
            await asyncio.sleep(0.02)
            batch = await shown(client, batch)
    return batch


async def results(client: httpx.AsyncClient, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a file of answers by custom_id; no id may be there twice."""
    if file_id is None:
        return {}
    content = (await client.get(f"/v1/files/{file_id}/content")).text
    found = [json.loads(one) for one in content.splitlines()]
    named = {one["custom_id"]: one for one in found}
    assert len(named) == len(found)
    return named


async def ended_lines(service: Running, **expected: int) -> None:
    """Wait until rbln_batch_lines_total has these numbers of lines by result."""
    async with asyncio.timeout(60):
        for result, number in expected.items():
            await service.until(f'rbln_batch_lines_total{{result="{result}"}}', number)


FORM = "multipart/form-data; boundary=b"


def form(*parts: tuple[str, str]) -> bytes:
    body = b""
    for head, content in parts:
        body += f"--b\r\ncontent-disposition: form-data; {head}\r\n\r\n{content}\r\n".encode()
    return body + b"--b--\r\n"


FILE = ('name="file"; filename="f"', "{}")
PURPOSE = ('name="purpose"', "batch")
ANCHOR = ('name="expires_after[anchor]"', "created_at")
SECONDS = 'name="expires_after[seconds]"'
