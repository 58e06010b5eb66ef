"""Resolution of `RblnConfig`: `additional_config` overrides the environment, that the defaults.

This is the only module of the backend that reads the environment. `RBLN_*` names outside the table
of `rbln_backend.variables` belong to the RBLN SDK, which reads them itself. A `VLLM_RBLN_*` name
outside the table is an error, unless the SDK is newer than this project, and has new ones.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from rbln_backend.config import STRICT, RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.variables import (
    BY_NAME,
    KINDS,
    OPTION_NAMES,
    SDK_RULES,
    VARIABLES,
    Status,
    Variable,
    later_rule,
    newer_sdk,
)

_PREFIX = "VLLM_RBLN_"
_OPTIONS = "additional_config"
# Keys that vLLM itself writes into `additional_config`, from flags of state-space models.
_OF_VLLM = frozenset({"gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend"})
_ROOT = "cache_root"

# Fields whose variable is refused or has no effect; the same holds for the option.
_LIMITED = {v.field: v for v in VARIABLES if v.status in (Status.NO_EFFECT, Status.REFUSED)}

# Messages that replace pydantic's, by error type.
_WORDS = {
    "bool_type": "Valid choices: true, false",
    "tuple_type": "must be a list",
    "string_too_short": "must not be empty",
    "too_short": "must have at least one entry",
}


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration, and warnings for the operator."""

    config: RblnConfig
    warnings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Address, credentials and cache of a model hub; None: the default of `huggingface_hub`."""

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)
    cache: Path | None = None
    is_offline: bool = False


@dataclass(frozen=True, slots=True)
class _Findings:
    """Checked values of fields, their sources, and warnings."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def take(self, name: str, value: object, source: str) -> None:
        self.values[name] = value
        self.sources[name] = source


def resolve(
    additional: Mapping[str, object] | None, environ: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """Build the config from vLLM's whole `additional_config` and the process's environment.

    Raises `ConfigError` for an unknown `VLLM_RBLN_*` name or option, a malformed value, an option
    that is given twice, or a request that this backend refuses, each naming the variable or option
    and its value.
    """
    found = _Findings()
    _read_environment(os.environ if environ is None else environ, found)
    _read_options(given_options(additional or {}), found)
    if _ROOT not in found.values:
        # The one default that has to be checked: it may need a home directory.
        default = RblnConfig.model_fields[_ROOT].default
        found.take(_ROOT, _checked(KINDS[_ROOT], default, _ROOT, repr(default)), "")
    # Each value is checked already, and has the type of its field.
    config = RblnConfig.model_construct(**found.values)
    try:
        config.check_buckets()
    except PydanticCustomError as error:
        raise ConfigError(_clash(error, found.sources)) from None
    return ResolvedConfig(config, found.warnings)


def given_options(additional: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of this backend: the object `rbln` and, as vllm-rbln has them, flat keys.

    Raises `ConfigError` if `rbln` is no object, or if an option is in both places.
    """
    section = additional.get("rbln", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"Invalid {_OPTIONS}['rbln']: {section!r}, must be an object")
    flat = {key: additional[key] for key in additional if key not in ("rbln", *_OF_VLLM)}
    if twice := sorted(flat.keys() & section.keys()):
        raise ConfigError(
            f"{twice[0]!r} is in {_OPTIONS} and in {_OPTIONS}['rbln']; give one of them"
        )
    return {**flat, **section}


def options_of_vllm(additional: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `additional_config` that vLLM's models read."""
    return {key: additional[key] for key in additional if key in _OF_VLLM}


def hub_settings(environ: Mapping[str, str] | None = None) -> HubSettings:
    """Return the settings of the model hub from the variables of `huggingface_hub`.

    It reads HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE.
    """
    given = os.environ if environ is None else environ
    offline = given.get("HF_HUB_OFFLINE") or given.get("TRANSFORMERS_OFFLINE") or ""
    cache = given.get("HF_HUB_CACHE")
    return HubSettings(
        endpoint=(given.get("HF_ENDPOINT") or "").rstrip("/") or None,
        token=given.get("HF_TOKEN") or None,
        cache=Path(cache).expanduser() if cache else None,
        is_offline=offline.upper() in ("1", "ON", "YES", "TRUE"),
    )


def child_environ(*, settings: bool, **more: str) -> dict[str, str]:
    """Return this process's environment without vLLM's settings, with ``more`` variables.

    ``settings`` keeps those of the RBLN backend. The cache root always stays.
    """
    kept = ("VLLM_CACHE_ROOT", *((_PREFIX, "RBLN_") if settings else ()))
    foreign = ("VLLM_", "RBLN_")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(kept) or not name.startswith(foreign)
    }
    return environ | more


def _read_environment(environ: Mapping[str, str], found: _Findings) -> None:
    for name in environ:
        if name.startswith(_PREFIX) and name not in BY_NAME:
            if (version := newer_sdk()) is not None:
                found.warnings.append(f"{name} is unknown, and ignored: RBLN SDK {version} is new")
                continue
            hint = _did_you_mean(name, (known for known in BY_NAME if known.startswith(_PREFIX)))
            raise ConfigError(f"Unknown environment variable {name}{hint}")
    for variable in VARIABLES:
        text = environ.get(variable.name)
        if text is None:
            continue
        try:
            value = variable.form.read(text)
        except ValueError as error:
            raise ConfigError(f"Invalid {variable.name}: {text}, {error}") from None
        if value is not None:
            value = _checked(variable.kind, value, variable.name, text)
            _take_variable(variable, value, text, found)


def _take_variable(variable: Variable, value: object, text: str, found: _Findings) -> None:
    _limit(variable, value, variable.name, text, found)
    target = variable.field
    if target is None:
        return
    if variable.status is Status.ALIAS:
        primary = next(other.name for other in VARIABLES if other.field == target)
        ignored = found.values.get(target, value) != value
        advice = f"ignored because {primary} is set" if ignored else f"deprecated, use {primary}"
        found.warnings.append(f"{variable.name} is {advice}")
    if target not in found.values:
        found.take(target, value, f"environment {variable.name}")


def _read_options(options: Mapping[str, Any], found: _Findings) -> None:
    for key, given in options.items():
        variable = BY_NAME[OPTION_NAMES[key]] if key in OPTION_NAMES else _LIMITED.get(key)
        target = variable.field if variable else key
        kind = variable.kind if variable else KINDS.get(key)
        if kind is None:
            hint = _did_you_mean(str(key), [*KINDS, *OPTION_NAMES])
            raise ConfigError(f"Unknown option {key!r} in {_OPTIONS}{hint}")
        value = _checked(kind, given, key, repr(given), " (from additional_config)")
        if variable:
            _limit(variable, value, key, repr(given), found)
        if target is not None:
            found.take(target, value, "additional_config")


def _checked(kind: Any, value: object, label: str, shown: str, source: str = "") -> object:
    """Return the value as its type normalises it; raises `ConfigError`."""
    try:
        return TypeAdapter(kind, config=STRICT).validate_python(value)
    except ValidationError as error:
        reason = _reason(error)
        raise ConfigError(f"Invalid {label}: {shown}, {reason}{source}") from None


def _limit(variable: Variable, value: object, label: str, shown: str, found: _Findings) -> None:
    """Refuse a value that is not supported, or warn that it has no effect."""
    rule, version = SDK_RULES.get(variable.name), newer_sdk()
    if rule is not None and version is not None and variable.accepts is None:
        message = later_rule(rule.name, f"{label}={shown}", version)
        if rule.accepts is None:
            found.warnings.append(message)
        elif value != rule.accepts:
            raise ConfigError(message)
        return
    if variable.status is Status.REFUSED and value != variable.accepts:
        raise ConfigError(f"{label}={shown} is not supported: {variable.doc}")
    is_usual = variable.accepts is not None and variable.accepts == value
    if variable.status is Status.NO_EFFECT and not is_usual:
        found.warnings.append(f"{label} has no effect: {variable.doc}")


def _reason(error: ValidationError) -> str:
    """Return the reason of an error, worded to follow a value."""
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if first["type"] == "literal_error":
        choices = str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        return f"Valid choices: {choices}"
    words = _WORDS.get(first["type"], said)
    is_in_list = bool(first["loc"]) and isinstance(first["loc"][-1], int)
    return f"each {words}" if is_in_list else words


def _clash(error: PydanticCustomError, sources: Mapping[str, str]) -> str:
    """Return the reason of an error across fields, and the sources of these fields."""
    fields = (error.context or {})["fields"]
    origins = [f"{name} from {sources[name]}" for name in fields if name in sources]
    return error.message() + (f" ({', '.join(origins)})" if origins else "")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known names: {', '.join(options)}"
