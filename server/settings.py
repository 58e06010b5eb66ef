"""The HTTP server's settings: one frozen object, and the only reader of the environment here.

A setting comes from its flag (`--drain-timeout-s`), else from `RBLN_SERVE_DRAIN_TIMEOUT_S`,
else from the default declared in `setting_groups`. The engine is configured by vLLM's flags and
`RblnConfig`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from server.setting_groups.http import (
    AccessSettings,
    AdapterSettings,
    AdmissionSettings,
    ConnectionSettings,
    ListenSettings,
    SchemaSettings,
)
from server.setting_groups.life import LifeSettings
from server.setting_groups.storage import StorageSettings

ENV_PREFIX = "RBLN_SERVE_"
# Variables of vLLM that also apply here.
_VLLM_KEY = "VLLM_API_KEY"
_VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"
# Prefixes of the variables that `collect-env` prints.
_REPORTED = (
    *(ENV_PREFIX, "VLLM_", "RBLN_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH", "OMP_"),
    *("KMP_", "MKL_", "LD_PRELOAD", "CUDA_VISIBLE", "OTEL_", "PYTORCH_"),
)
_SECRET = re.compile("KEY|TOKEN|PASSWORD|SECRET|HEADERS", re.IGNORECASE)
_USER_INFO = re.compile(r"://[^/@\s]+@")
_OTEL_NAME, _OTEL_ATTRIBUTES = "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"
# One level less: vLLM's info messages about a start concern its developers.
_LEVELS_OF_VLLM = {"debug": "DEBUG", "info": "WARNING", "warning": "ERROR", "error": "CRITICAL"}


class SettingsError(ValueError):
    """A setting is invalid; the message names flag, variable, value and the accepted values."""


class ServerSettings(
    LifeSettings,
    AdapterSettings,
    StorageSettings,
    SchemaSettings,
    AdmissionSettings,
    AccessSettings,
    ConnectionSettings,
    ListenSettings,
    BaseSettings,
):
    """Settings of one server process; secrets are printed as asterisks."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        validate_default=False,
    )


def load_settings(flags: Mapping[str, object], config_file: Mapping[str, object]) -> ServerSettings:
    """Build the settings from `flags`, the environment and `config_file`, in this order.

    Raises `SettingsError` for an unknown variable of our prefix or an invalid value.
    """
    _check_names()
    named = _names()
    below = {k: v for k, v in config_file.items() if f"{ENV_PREFIX}{k.upper()}" not in named}
    key = os.environ.get(_VLLM_KEY)
    if key is not None and "api_key" not in flags and f"{ENV_PREFIX}API_KEY" not in named:
        if not key.strip():
            raise SettingsError(f"{_VLLM_KEY} is empty; unset it to have no key")
        # One key, even if it contains commas.
        below.setdefault("api_key", json.dumps([key]))
    try:
        settings = ServerSettings(**{**below, **flags})  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(dict(item)) for item in error.errors())) from None
    _check_together(settings)
    return settings


def export_log_level(settings: ServerSettings) -> None:
    """Set vLLM's log level one level below `--log-level`, unless VLLM_LOGGING_LEVEL is set.

    Engine processes inherit the variable. Call this before vLLM is imported.
    """
    os.environ.setdefault(_VLLM_LOG_LEVEL, _LEVELS_OF_VLLM[settings.log_level])


def reported_variables() -> dict[str, str]:
    """Return the variables that change what is served, for `collect-env`.

    Keys, tokens and passwords, those in URLs included, are replaced by asterisks.
    """
    return {
        name: "***" if _SECRET.search(name) else _USER_INFO.sub("://***@", value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_REPORTED)
    }


def export_service_name() -> None:
    """Set the service name of spans to rbln-serve, unless OpenTelemetry's variables set another.

    vLLM configures the tracer providers of all processes by these variables alone.
    """
    if "service.name=" not in os.environ.get(_OTEL_ATTRIBUTES, ""):
        os.environ.setdefault(_OTEL_NAME, "rbln-serve")


def _check_together(settings: ServerSettings) -> None:
    if (settings.ssl_keyfile is None) != (settings.ssl_certfile is None):
        raise SettingsError("--ssl-keyfile and --ssl-certfile must be set together")
    if settings.ssl_cert_reqs != "none" and settings.ssl_ca_certs is None:
        raise SettingsError(
            f"--ssl-cert-reqs {settings.ssl_cert_reqs} needs --ssl-ca-certs to check against"
        )
    if settings.enable_ssl_refresh and settings.ssl_certfile is None:
        raise SettingsError("--enable-ssl-refresh needs --ssl-certfile")
    if settings.allow_credentials and "*" in settings.allowed_origins:
        raise SettingsError(
            "--allow-credentials cannot be used with --allowed-origins '*': name the origins"
        )


def _names() -> set[str]:
    return {name.upper() for name in os.environ if name.upper().startswith(ENV_PREFIX)}


def _check_names() -> None:
    known = [f"{ENV_PREFIX}{name.upper()}" for name in ServerSettings.model_fields]
    for name in sorted(_names() - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise SettingsError(f"unknown environment variable {name}; {hint}")


def _explain(error: Mapping[str, object]) -> str:
    loc = error["loc"]
    name = str(loc[0]) if isinstance(loc, tuple) and loc else "?"
    flag = "--" + name.replace("_", "-")
    field = ServerSettings.model_fields.get(name)
    is_secret = field is not None and "Secret" in str(field.annotation)
    got = "a value that is not shown" if is_secret else repr(error["input"])
    problem = str(error["msg"]).removeprefix("Value error, ")
    return f"{flag} ({ENV_PREFIX}{name.upper()}): {problem}, got {got}"
