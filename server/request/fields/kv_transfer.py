"""The check of `kv_transfer_params`, which a router copies from one server's answer to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.errors import InvalidValueError, UnsupportedFieldError, describe
from server.request.fields.field import FieldKind
from server.request.fields.rows import obeyed
from server.wire.endpoint import JsonObject

TRANSFERRED = obeyed(
    "kv_transfer_params", why="with NixlConnector; a router sets it", kind=FieldKind.TRANSFER
)
_MOST = 1 << 31


def check_kv_transfer(field: str, given: Any, body: JsonObject, *, is_on: bool) -> None:
    """Raise the `RequestError` of the first key of `given` that the engine could fail on.

    vLLM's connector uses the values as they are: a wrong type would end the engine.
    """
    if not given:
        return
    if not is_on:
        raise UnsupportedFieldError(
            f"'{field}' is not supported: this server runs without NixlConnector "
            "(--kv-transfer-config).",
            param=field,
        )
    if not isinstance(given, dict):
        raise _invalid(field, "be an object", given)
    if (body.get("n") or 1) != 1 or body.get("use_beam_search"):
        raise _invalid(field, "come with n=1 and without beam search", given)
    for name, value in given.items():
        if name not in _KEYS:
            raise _invalid(f"{field}.{name}", f"be one of {', '.join(_KEYS)}", name)
        is_valid, wanted = _KEYS[name]
        if value is not None and not is_valid(value):
            raise _invalid(f"{field}.{name}", f"be {wanted}", value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _is_rank_count(value: object) -> bool:
    return _is_size(value) and value in range(1, 1025)


def _is_port(value: object) -> bool:
    return _is_size(value) and value in range(1, 1 << 16)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


def _are_blocks(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, list) and all(map(_is_size, group)) for group in value
    )


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SIZE = (_is_size, "a whole number")
_COUNT = (_is_rank_count, "1 to 1024")
_NAME = (_is_name, "a text of at most 256 characters")
_FLAG = (_is_flag, "true or false")
_KEYS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "do_remote_prefill": _FLAG,
    "do_remote_decode": _FLAG,
    "remote_engine_id": _NAME,
    "remote_request_id": _NAME,
    "remote_block_ids": (_are_blocks, "lists of block numbers"),
    "remote_host": _NAME,
    "remote_port": (_is_port, "1 to 65535"),
    "remote_num_tokens": _SIZE,
    "remote_blocks_expiry_time": (_is_time, "a number"),
    "transfer_mode": (lambda value: value == "pull", "'pull'"),
    "tp_size": _COUNT,
    "pp_size": _COUNT,
    "dcp_size": _COUNT,
    "rbln_prompt_digest": _NAME,
}


def _invalid(param: str, wanted: str, value: object) -> InvalidValueError:
    return InvalidValueError(f"'{param}' must {wanted}, got {describe(value)}.", param=param)
