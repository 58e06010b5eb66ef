"""Finds the model that a request is for: the query's `model`, the body's, or a stored object's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qsl, unquote, urlencode

import msgspec
from starlette.types import Scope

from server.errors import (
    BodyTooLargeError,
    InvalidJsonError,
    InvalidTypeError,
    InvalidValueError,
    MissingFieldError,
    ModelNotFoundError,
    NotFoundError,
    describe,
)
from server.model_pool.choice.batch_files import (
    first_line_of,
    input_file_of,
    model_of_line,
    model_of_message_batch,
)
from server.model_pool.choice.stored_objects import StoredObjects
from server.model_pool.forwarding import RequestBody
from server.model_pool.pooled_model import PooledModel
from server.request.body import body_timeout
from server.request.route_table import Route
from server.settings import ServerSettings

_QUERY = "model"
_CURSORS = ("after", "after_id", "before_id")
"""Fields of the query that name the object at the end of a page."""
_FILES, _BATCHES, _MESSAGE_BATCHES = "/v1/files", "/v1/batches", "/v1/messages/batches"
_ADAPTERS = "/v1/lora_adapters/"
_WITH_MODEL = ("/v1/structured_outputs/validate",)


class _NamedModel(msgspec.Struct):
    """The fields of a body that choose how it is handled."""

    model: str | None = None
    stream: object = None


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """The model of a request; `streams` says whether its answer is an event stream."""

    model: PooledModel
    streams: bool = False


class ModelChoice:
    """The models by the names that requests use."""

    def __init__(self, models: Mapping[str, PooledModel], settings: ServerSettings) -> None:
        self._models = models
        self._settings = settings
        self._stored = StoredObjects(settings.data_dir, models.values())

    def named(self, name: str) -> PooledModel:
        """Return the model of this name, or with an adapter of it. Raises `ModelNotFoundError`."""
        if (model := self._models.get(name)) is not None:
            return model
        for model in self._models.values():
            if name in model.adapters:
                return model
        names = ", ".join(map(repr, self._models))
        raise ModelNotFoundError(
            f"The model {describe(name)} does not exist; this server has {names}.", param="model"
        )

    async def of_request(self, route: Route, scope: Scope, body: RequestBody) -> ChosenModel:
        """Return the model of a request; takes `model` out of the query.

        Raises the `RequestError` of a request that names no model.
        """
        if (name := take_query(scope, _QUERY)) is not None:
            return ChosenModel(self.named(name))
        if route.admitted or route.template in _WITH_MODEL:
            await self._read(scope, body)
            name, streams = _named_model(body.read)
            return ChosenModel(self.named(name), streams)
        if (found := await self._of_stored(route, scope, body)) is not None:
            return ChosenModel(found)
        if route.template.startswith(_ADAPTERS):
            return ChosenModel(self.named(unquote(scope["path"]).removeprefix(_ADAPTERS)))
        raise self._unnamed(scope)

    async def _of_stored(self, route: Route, scope: Scope, body: RequestBody) -> PooledModel | None:
        """Return the model of a file, batch or response, or of the new one that a body describes.

        None for other routes. Raises `NotFoundError` for an id that no model has.
        """
        if "_id}" in route.template:
            path = str(scope["path"])
            object_id = path[path.index(route.prefix) + len(route.prefix) :].partition("/")[0]
            return await self._owner(object_id, None)
        if scope["method"] != "POST":
            cursor = next((c for c in map(partial(query_of, scope), _CURSORS) if c), None)
            return None if cursor is None else await self._owner(cursor, "after")
        if route.template == _FILES:
            name = model_of_line(await self._first_line(scope, body))
        elif route.template == _BATCHES:
            await self._read(scope, body)
            return await self._owner(input_file_of(body.read), "input_file_id")
        elif route.template == _MESSAGE_BATCHES:
            await self._read(scope, body)
            name = model_of_message_batch(body.read)
        else:
            return None
        if name is None:
            raise self._unnamed(scope)
        return self.named(name)

    async def _owner(self, object_id: str, param: str | None) -> PooledModel:
        if (found := await self._stored.owner_of(object_id)) is None:
            raise NotFoundError(f"{describe(object_id)} does not exist.", param=param)
        return found

    async def _read(self, scope: Scope, body: RequestBody) -> None:
        await read_whole(body, scope["headers"], self._settings)

    async def _first_line(self, scope: Scope, body: RequestBody) -> bytes:
        """Receive an upload up to the end of the first line of its file, and return that line."""
        async with body_timeout():
            while (line := first_line_of(body.read, complete=body.complete)) is None:
                if body.complete or len(body.read) > self._settings.max_body_bytes:
                    raise self._unnamed(scope)
                body.read += await body.next_chunk()
        return line

    def _unnamed(self, scope: Scope) -> InvalidValueError:
        return InvalidValueError(
            f"{scope['method']} {describe(scope['path'])} needs the query `?model=NAME` on a "
            f"server of several models: {', '.join(map(repr, self._models))}.",
            param="model",
        )


def query_of(scope: Scope, name: str) -> str | None:
    """Return a field of the query, None without one."""
    fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return next((value for key, value in fields if key == name), None)


def take_query(scope: Scope, name: str) -> str | None:
    """Return a field of the query and take it out; None without one."""
    if (found := query_of(scope, name)) is None:
        return None
    fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    rest = [(key, value) for key, value in fields if key != name]
    scope["query_string"] = urlencode(rest).encode("ascii")
    return found


async def read_whole(
    body: RequestBody, headers: Iterable[tuple[bytes, bytes]], settings: ServerSettings
) -> None:
    """Receive the rest of a body of at most --max-body-bytes.

    Raises `BodyTooLargeError`, `BodyTimeoutError` or `ClientGoneError`.
    """
    length = next((value for name, value in headers if name == b"content-length"), b"0")
    limit = settings.max_body_bytes
    chunks = [body.read]
    size = len(body.read)
    if int(length[:18]) > limit:
        raise _too_large(limit)
    async with body_timeout():
        while not body.complete:
            chunks.append(await body.next_chunk())
            size += len(chunks[-1])
            if size > limit:
                raise _too_large(limit)
    body.read = b"".join(chunks)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"The request body is larger than the limit of {limit} bytes (--max-body-bytes)."
    )


def _named_model(raw: bytes) -> tuple[str, bool]:
    """Return the body's `model`, and whether its answer is a stream.

    Raises `InvalidJsonError`, `InvalidTypeError` or `MissingFieldError`.
    """
    try:
        found = msgspec.json.decode(raw, type=_NamedModel)
    except msgspec.ValidationError as error:
        raise InvalidTypeError(f"'model' must be a string: {error}.", param="model") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJsonError(f"The request body is not valid JSON: {error}.") from None
    if found.model is None:
        raise MissingFieldError(
            "'model' is missing; a server of several models needs it.", param="model"
        )
    return found.model, found.stream is True
