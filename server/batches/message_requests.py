"""The requests of a batch of Anthropic's API: what one is, and as a line of an input file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import to_json

from server.batches.batch import LineError
from server.batches.input_lines import MAX_ID_CHARS
from server.errors import InvalidValueError
from server.frontend import Endpoint, JsonObject

_LINES = 1000
"""Of one piece of the file."""


class MessageRequest(BaseModel):
    """One of a batch's requests."""

    model_config = ConfigDict(extra="forbid")

    custom_id: str = Field(description=f"1 to {MAX_ID_CHARS} characters, the batch's only one.")
    params: dict[str, Any] = Field(description="The body of `POST /v1/messages`; no `stream`.")

    def line(self) -> bytes:
        """Return it as a line of a batch's input."""
        asked = {"method": "POST", "url": Endpoint.MESSAGES.value, "body": self.params}
        return to_json({"custom_id": self.custom_id} | asked) + b"\n"


class CreateMessageBatchBody(BaseModel):
    """What `POST /v1/messages/batches` takes."""

    model_config = ConfigDict(extra="forbid")

    requests: list[Annotated[JsonObject, WithJsonSchema(MessageRequest.model_json_schema())]] = (
        Field(description="As many as --max-batch-lines, within --max-body-bytes.")
    )


class WrittenInput:
    """The input file that the service writes for such a batch, a `Source` of `FileStore`."""

    name: str | None = "message_batch.jsonl"

    def __init__(self, lines: Sequence[bytes]) -> None:
        self.fields: dict[str, str] = {}
        self._lines = lines

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the content."""
        for begin in range(0, len(self._lines), _LINES):
            yield b"".join(self._lines[begin : begin + _LINES])


def refused(error: LineError) -> InvalidValueError:
    """Return what is wrong with a line, as the client knows it."""
    if error["line"] is None:
        return InvalidValueError(error["message"], param="requests")
    place = f"requests[{error['line'] - 1}]"
    field = (error["param"] or "").replace("body", "params")
    return InvalidValueError(
        f"'{place}': {error['message']}", param=f"{place}.{field}" if field else place
    )
