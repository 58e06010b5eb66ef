"""How `RblnConfig` is made: `additional_config` wins over the environment, that over defaults.

This is the only module of the backend that reads the environment. `RBLN_*` names that are not in
the table of `rbln_backend.variables` belong to the RBLN SDK, which reads them itself; a
`VLLM_RBLN_*` name that is not there is an error.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rbln_backend.config import CLASH, STRICT, RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.variables import BY_NAME, KINDS, OPTION_NAMES, VARIABLES, Status, Variable

_PREFIX = "VLLM_RBLN_"
_OPTIONS = "additional_config['rbln']"

# Fields that are not simply set: what their variable says of them holds for the option as well.
_LIMITED = {v.field: v for v in VARIABLES if v.status in (Status.NO_EFFECT, Status.REFUSED)}

# Where pydantic's words say less than ours.
_WORDS = {
    "bool_type": "Valid choices: true, false",
    "tuple_type": "must be a list",
    "string_too_short": "must not be empty",
    "too_short": "must have at least one entry",
}


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A config, and what the operator should be told."""

    config: RblnConfig
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Findings:
    """The values of fields, where they came from, and warnings."""

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

    Raises `ConfigError` for an unknown `VLLM_RBLN_*` name or option, a malformed value, or a
    request that this backend refuses, each naming the variable or option and its value.
    """
    found = _Findings()
    _read_environment(os.environ if environ is None else environ, found)
    _read_options((additional or {}).get("rbln", {}), found)
    try:
        config = RblnConfig(**found.values)
    except ValidationError as error:
        raise ConfigError(_clash(error, found.sources)) from None
    return ResolvedConfig(config, found.warnings)


def child_environ(*, settings: bool, **more: str) -> dict[str, str]:
    """Return an environment for a process that shall not see vLLM's settings of this one.

    ``settings`` keeps those of the RBLN backend; the cache root always stays.
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


def _read_options(section: object, found: _Findings) -> None:
    if not isinstance(section, Mapping):
        raise ConfigError(f"Invalid {_OPTIONS}: {section!r}, must be an object")
    for key, given in section.items():
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
    """Return the value as its type has it."""
    try:
        return TypeAdapter(kind, config=STRICT).validate_python(value)
    except ValidationError as error:
        reason = _reason(error)
        raise ConfigError(f"Invalid {label}: {shown}, {reason}{source}") from None


def _limit(variable: Variable, value: object, label: str, shown: str, found: _Findings) -> None:
    """Refuse or warn where the value asks for something that is not done."""
    if variable.status is Status.REFUSED and value != variable.accepts:
        raise ConfigError(f"{label}={shown} is not supported: {variable.doc}")
    if variable.status is Status.NO_EFFECT and not _is_default(variable.field, value):
        found.warnings.append(f"{label} has no effect: {variable.doc}")


def _is_default(name: str | None, value: object) -> bool:
    """Whether nobody will miss an effect, because the value asks for what is done anyway."""
    return name is not None and RblnConfig.model_fields[name].default == value


def _reason(error: ValidationError) -> str:
    """Say what is wrong, in words that follow a value."""
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if first["type"] == "literal_error":
        choices = str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
        return f"Valid choices: {choices}"
    words = _WORDS.get(first["type"], said)
    is_in_list = bool(first["loc"]) and isinstance(first["loc"][-1], int)
    return f"each {words}" if is_in_list else words


def _clash(error: ValidationError, sources: Mapping[str, str]) -> str:
    """Say what is wrong with values that are right each for itself, and where they came from."""
    first = error.errors()[0]
    if first["type"] != CLASH:
        # A default: what was given is checked.
        return f"Invalid {first['loc'][0]}: {first['input']!r}, {_reason(error)}"
    origins = [f"{n} from {sources[n]}" for n in first["ctx"]["fields"] if n in sources]
    return first["msg"] + (f" ({', '.join(origins)})" if origins else "")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known names: {', '.join(options)}"
