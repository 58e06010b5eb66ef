"""What the fields of `RblnConfig` may hold: their types, their choices and the checks of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args

from rbln_backend.errors import ConfigError
from rbln_backend.host.cores import parse_cores

Device: TypeAlias = Literal["auto", "emulated", "rebel"]
Kernels: TypeAlias = Literal["auto", "native", "aten"]
HotPathPolicy: TypeAlias = Literal["error", "warn"]
Allocator: TypeAlias = Literal["auto", "system"]
HugePages: TypeAlias = Literal["auto", "off"]
Processors: TypeAlias = str
"""`none`, or a list of processor numbers and ranges such as `0-3,8`."""
Count: TypeAlias = int
"""A number that may be zero; a plain ``int`` option must be positive."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    "device": get_args(Device),
    "kernels": get_args(Kernels),
    "hot_path_policy": get_args(HotPathPolicy),
    "allocator": get_args(Allocator),
    "huge_pages": get_args(HugePages),
    "decode_batch_bucket_strategy": ("exponential", "exp", "linear", "manual"),
}
"""The allowed values of the fields that have a closed set of them."""


def _reject(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"Invalid {name}: {value!r}, {expected}")


def _check_bool(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise _reject(name, value, "Valid choices: true, false")
    return value


def _check_positive_int(name: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _reject(name, value, "must be an integer")
    if value <= 0:
        raise ConfigError(f"{name} must be greater than 0, got {value}")
    return value


def _check_count(name: str, value: object) -> object:
    return value if value == 0 and not isinstance(value, bool) else _check_positive_int(name, value)


def _check_str(name: str, value: object) -> object:
    if not isinstance(value, str) or not value:
        raise _reject(name, value, "must be a non-empty string")
    choices = CHOICES.get(name)
    if choices is None:
        return value
    lowered = value.lower()
    if lowered not in choices:
        raise _reject(name, value, f"Valid choices: {', '.join(choices)}")
    return "exponential" if lowered == "exp" else lowered


def _check_processors(name: str, value: object) -> object:
    if value == "none":
        return value
    if not isinstance(value, str):
        raise _reject(name, value, "must be a string")
    try:
        parse_cores(value)
    except ValueError as error:
        raise _reject(name, value, f"must be `none` or a list such as 0-3,8: {error}") from None
    return value


def _check_texts(name: str, value: object) -> object:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise _reject(name, value, "must be a list of strings")
    return tuple(_check_str(name, text) for text in value)


def _check_sizes(name: str, value: object) -> object:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise _reject(name, value, "must be a list of integers")
    for size in value:
        if isinstance(size, bool) or not isinstance(size, int):
            raise _reject(name, value, "must be a list of integers")
    if any(size <= 0 for size in value):
        raise ConfigError(f"{name} must all be > 0, got {list(value)}")
    if len(set(value)) != len(value):
        raise ConfigError(f"{name} must be unique, got {list(value)}")
    return tuple(sorted(value))


def _check_nonempty_sizes(name: str, value: object) -> object:
    sizes = _check_sizes(name, value)
    if not sizes:
        raise _reject(name, value, "must have at least one entry")
    return sizes


def _optional(check: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None else check(name, value)


CHECKS: Mapping[str, Callable[[str, object], object]] = {
    "bool": _check_bool,
    "int": _check_positive_int,
    "Count": _check_count,
    "int | None": _optional(_check_positive_int),
    "str": _check_str,
    "Device": _check_str,
    "Kernels": _check_str,
    "HotPathPolicy": _check_str,
    "Allocator": _check_str,
    "HugePages": _check_str,
    "Processors": _check_processors,
    "str | None": _optional(_check_str),
    "tuple[str, ...]": _check_texts,
    "tuple[int, ...]": _check_sizes,
    "tuple[int, ...] | None": _optional(_check_nonempty_sizes),
}
