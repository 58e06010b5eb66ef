"""The HTTP server's settings: one frozen object, and the only reader of the environment here.

A setting comes from its flag (`--drain-timeout-s`), else from `RBLN_SERVE_DRAIN_TIMEOUT_S`,
else from the default declared here. The engine is configured by vLLM's flags and `RblnConfig`.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

ENV_PREFIX = "RBLN_SERVE_"
# Variables of vLLM that also apply here.
_VLLM_KEY = "VLLM_API_KEY"
_VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"
# Prefixes of the variables that `collect-env` prints.
_REPORTED = (
    ENV_PREFIX,
    "VLLM_",
    "RBLN_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "TORCH",
    "OMP_",
    "KMP_",
    "MKL_",
    "LD_PRELOAD",
    "CUDA_VISIBLE",
    "OTEL_",
    "PYTORCH_",
)
_SECRET = re.compile("KEY|TOKEN|PASSWORD|SECRET|HEADERS", re.IGNORECASE)
_USER_INFO = re.compile(r"://[^/@\s]+@")
_OTEL_NAME, _OTEL_ATTRIBUTES = "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"
# One level less: vLLM's info messages about a start concern its developers.
_LEVELS_OF_VLLM = {"debug": "DEBUG", "info": "WARNING", "warning": "ERROR", "error": "CRITICAL"}


class SettingsError(ValueError):
    """A setting is invalid; the message names flag, variable, value and the accepted values."""


# Types of settings. A list is a JSON array or separated by commas; its flag may be repeated.


def _split(value: object) -> object:
    """Return the items of a list in a flag or a variable."""
    if isinstance(value, list | tuple):
        return [item for part in value for item in _items(part)]
    return _items(value)


def _items(value: object, *, keep_empty: bool = False) -> list[object]:
    if not isinstance(value, str):
        return [value]
    if value.lstrip().startswith("["):
        try:
            return list(json.loads(value))
        except ValueError:
            pass
    return [item.strip() for item in value.split(",") if keep_empty or item.strip()]


def _secrets(value: object) -> object:
    """Return the secrets of a list; refuses empty ones, which come from unset shell variables."""
    parts = value if isinstance(value, list | tuple) else [value]
    secrets = [item for part in parts for item in _items(part, keep_empty=True)]
    if not secrets or not all(
        (secret.get_secret_value() if isinstance(secret, SecretStr) else str(secret)).strip()
        for secret in secrets
    ):
        raise ValueError("an empty value; leave flag and variable out to have none")
    return secrets


def _not_empty(value: object) -> object:
    """Refuse the empty path, which would mean the working directory."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("an empty path; leave flag and variable out to have none")
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_secrets)]
OptionalPath = Annotated[Path | None, BeforeValidator(_not_empty)]


_SSL_CONSTANTS: Mapping[str, str] = {"0": "none", "1": "optional", "2": "required"}
"""Values of constants of Python's `ssl`, which vLLM's flag takes."""
ClientCertificates = Annotated[
    Literal["none", "optional", "required"],
    BeforeValidator(lambda value: _SSL_CONSTANTS.get(str(value), value)),
]


SECTIONS: Mapping[str, str] = {
    "host": "Listening address, TLS and CORS",
    "max_connections": "Limits of client connections in number, bytes and time",
    "api_key": "API keys, admin keys and unauthenticated routes",
    "max_in_flight": "Limits of concurrent work and of the size of a request",
    "undeclared_properties": "Limits of the size and the compilation time of grammars",
    "data_dir": "Storage of files, batches and responses",
    "lora_root": "Locations and base model names of LoRA adapters loaded at run time",
    "drain_timeout_s": "Start, stop, failure and log",
}
"""Titles of the groups of flags in the command line's help, by the first setting of each."""


class ServerSettings(BaseModel):
    """Settings of one server process; secrets are printed as asterisks."""

    # Descriptions in --help and the documents are the docstrings.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "0.0.0.0"  # noqa: S104
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0 picks a free one."""
    uds: OptionalPath = None
    """Unix socket to listen on instead of --host and --port; only this user may connect."""
    root_path: str = Field("", pattern=r"^(/[^/?#\s]+)*$")
    """Path prefix that a reverse proxy strips, such as /llm."""
    ssl_keyfile: OptionalPath = None
    """TLS private key; with --ssl-certfile."""
    ssl_certfile: OptionalPath = None
    """TLS certificate chain."""
    ssl_keyfile_password: SecretStr | None = None
    """Password of the TLS private key."""
    ssl_ca_certs: OptionalPath = None
    """Certificate authorities that client certificates are checked against."""
    ssl_cert_reqs: ClientCertificates = "none"
    """Client certificates, checked against --ssl-ca-certs: none, optional or required."""
    ssl_ciphers: str | None = None
    """OpenSSL cipher list for TLS 1.2."""
    enable_ssl_refresh: bool = False
    """Reload the TLS certificate when its file changes."""
    allowed_origins: Words = ()
    """Origins allowed by CORS; `*` allows all. Empty: CORS is off."""
    allowed_methods: Words = ("GET", "POST", "DELETE")
    """Methods allowed by CORS."""
    allowed_headers: Words = ("*",)
    """Request headers allowed by CORS; `*` allows all."""
    allow_credentials: bool = False
    """Allow cookies in CORS requests; not together with the origin `*`."""

    max_connections: int = Field(4096, ge=1)
    """Maximum number of client connections; more get 503. Fewer if the process may not open as many
    files."""
    max_connections_per_client: int | None = Field(None, ge=1)
    """Maximum number of connections from one IPv4 address or IPv6 /64 network; more get 429. Unset:
    three quarters of --max-connections."""
    max_header_bytes: int = Field(64 * 1024, ge=1024)
    """Maximum size of request line and headers in bytes; above: 431."""
    keep_alive_s: int = Field(120, ge=1)
    """Seconds for which an idle client connection stays open: longer than clients keep one that
    they use again (Go's and llm-d's sidecar 90 s), else they get a reset."""

    api_key: Secrets = ()
    """API keys; `name=key` sets the name in metrics and logs. Prefer a file or RBLN_SERVE_API_KEY:
    flags are visible in the process list."""
    api_key_file: OptionalPath = None
    """File of API keys, one `name=key` or `name=sha256:<hex digest>` per line; reloaded when it
    changes."""
    admin_key: Secrets = ()
    """Keys for /admin and for loading adapters; same format as --api-key."""
    admin_key_file: OptionalPath = None
    """File of admin keys; reloaded when it changes."""
    key_max_in_flight: int | None = Field(None, ge=1)
    """Maximum number of requests in flight of one API key; then 429. `name[in-flight:N]=key` sets
    another one. Unset: no limit but --max-in-flight."""
    key_requests_per_minute: int | None = Field(None, ge=1)
    """Maximum number of requests per minute of one API key; then 429. `name[rpm:N]=key` sets
    another one. Unset: no limit."""
    key_tokens_per_minute: int | None = Field(None, ge=1)
    """Maximum number of tokens per minute of one API key, of prompts and answers; then 429.
    `name[tpm:N]=key` sets another one. Unset: no limit."""
    allow_unguarded_changes: bool = False
    """Without admin keys, allow every API client to load and unload adapters, and programs on this
    host to use /admin, even if --host is no loopback address."""
    console: bool = True
    """Serve the console, a page without data, at /."""
    open_metrics: bool = False
    """Serve /metrics and /version without a key even if keys are set."""

    max_in_flight: int | None = Field(None, ge=1)
    """Maximum number of running and waiting sequences, counting each of `n`; then 429. Unset:
    max_num_seqs that run, and as many again, at least 32, that wait."""
    max_queued_tokens: int | None = Field(None, ge=1)
    """Maximum number of prompt tokens that wait for prefill; then requests get 429. Unset:
    max_num_seqs times max_model_len per data-parallel rank, at least 16384; unlimited for pooling
    models."""
    max_queue_s: float = Field(60.0, ge=0)
    """Seconds for which a request may wait in the queue; then 503. 0: no limit."""
    prefill_policy: Literal["shortest", "fcfs"] | None = None
    """Order of prompts: `shortest` computes the prompt with the fewest tokens left first, `fcfs`
    one prompt after the other. Unset: shortest; fcfs for pooling models."""
    max_num_partial_prefills: int | None = Field(None, ge=1)
    """Maximum number of prompts that are partly computed at the same time; prompts of at most a
    chunk begin beside them. Unset: 4."""
    max_request_s: float = Field(0.0, ge=0)
    """Timeout of a request in seconds; X-Request-Timeout-Ms can lower it. 0: no limit."""
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    """Maximum size of a request body in bytes."""
    max_n: int = Field(128, ge=1)
    """Maximum `n`; the engine's max_num_seqs is a second limit."""
    max_stop: int = Field(4, ge=1, le=64)
    """Maximum number of `stop` strings in one request."""
    unknown_fields: Literal["reject", "warn"] = "reject"
    """Treatment of unknown request fields: 400 or a logged warning."""
    default_tool_prompt: bool = True
    """Add tools in Hermes format to the prompt if the chat template does not render tools;
    --no-default-tool-prompt rejects requests with tools for such a model."""
    sanitize_control_tokens: bool = True
    """Tokenize the text of a control token in a conversation as ordinary text;
    --no-sanitize-control-tokens lets clients write turns and markup, as vLLM does."""

    undeclared_properties: Literal["omit", "allow"] = "omit"
    """Rule of schemas: `omit`: objects of which properties are listed have no others, unless the
    schema has `additionalProperties`; `allow`: others may follow."""
    schema_max_bytes: int = Field(64 * 1024, ge=256)
    """Maximum size of a schema, regex or grammar in bytes."""
    schema_compile_cpu_s: float = Field(5.0, gt=0)
    """Processor seconds for compiling a grammar; above: 400. A grammar that takes ten times as long
    on the clock gets 503 with Retry-After."""
    schema_workers: int = Field(1, ge=1, le=16)
    """Processes that compile grammars before the engine does."""

    data_dir: OptionalPath = None
    """Directory for files, batches and responses, used by one server only. Unset: /v1/files and
    /v1/batches return 501, and responses are not stored."""
    max_file_bytes: int = Field(200 * 1024 * 1024, ge=1024)
    """Maximum size of an uploaded file in bytes."""
    max_stored_bytes: int = Field(20 * 1024 * 1024 * 1024, ge=1024)
    """Maximum size of all files and stored responses together in bytes."""
    max_batch_lines: int = Field(50_000, ge=1)
    """Maximum number of lines in one batch."""
    file_retention_s: int = Field(30 * 24 * 3600, ge=0)
    """Seconds after which files and finished batches are deleted, unless the client set another
    time. 0: never."""
    response_retention_s: int = Field(30 * 24 * 3600, ge=0)
    """Seconds after which a response is deleted unless another one continues it. 0: never."""
    min_free_bytes: int = Field(1024 * 1024 * 1024, ge=0)
    """Bytes kept free on the disk of --data-dir; below it, uploads get 507 and batches wait."""

    lora_root: OptionalPath = None
    """Directory below which adapters may be loaded over HTTP. Unset: only those of
    --lora-modules."""
    lora_state_file: OptionalPath = None
    """File that lists the loaded adapters for a restart. Unset: `adapters.json` in --lora-root, if
    writable."""
    lora_base_names: Words = ()
    """Further accepted endings of an adapter's base_model_name_or_path; `*` accepts all. MODEL and
    its served names are always accepted."""

    drain_timeout_s: float = Field(25.0, ge=0)
    """Seconds for in-flight requests to finish after SIGTERM."""
    step_timeout_s: float = Field(120.0, ge=0)
    """Seconds without a finished step, despite pending work, after which the engine counts as hung
    and the process exits. 0: never."""
    run_root: OptionalPath = None
    """Parent of the run directory. Unset: the system's temporary directory."""
    headless: bool = False
    """Run data-parallel engines for the server at --data-parallel-address, without an API; probes
    and metrics are answered."""
    engine_start: Literal["forkserver", "spawn"] = "forkserver"
    """Start method of the engine process; `spawn` is slower and needs no fork server."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the server's log."""
    log_format: Literal["text", "json"] = "text"
    """Format of the server's log."""

    @property
    def listens_locally(self) -> bool:
        """Return whether clients are programs on this host: a loopback address or a socket."""
        if self.uds is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def load_settings(flags: Mapping[str, object], config_file: Mapping[str, object]) -> ServerSettings:
    """Build the settings from `flags`, the environment and `config_file`, in this order.

    Raises `SettingsError` for an unknown variable of our prefix or an invalid value.
    """
    known = [f"{ENV_PREFIX}{name.upper()}" for name in ServerSettings.model_fields]
    variables = {k.upper(): v for k, v in os.environ.items() if k.upper().startswith(ENV_PREFIX)}
    for name in sorted(variables.keys() - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise SettingsError(f"unknown environment variable {name}; {hint}")
    named: dict[str, object] = {k[len(ENV_PREFIX) :].lower(): v for k, v in variables.items()}
    values = {**config_file, **named, **flags}
    key = os.environ.get(_VLLM_KEY)
    if key is not None and "api_key" not in {**named, **flags}:
        if not key.strip():
            raise SettingsError(f"{_VLLM_KEY} is empty; unset it to have no key")
        # One key, even if it contains commas.
        values.setdefault("api_key", json.dumps([key]))
    try:
        settings = ServerSettings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(dict(item)) for item in error.errors())) from None
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


def _explain(error: Mapping[str, object]) -> str:
    loc = error["loc"]
    name = str(loc[0]) if isinstance(loc, tuple) and loc else "?"
    flag = "--" + name.replace("_", "-")
    field = ServerSettings.model_fields.get(name)
    is_secret = field is not None and "Secret" in str(field.annotation)
    got = "a value that is not shown" if is_secret else repr(error["input"])
    problem = str(error["msg"]).removeprefix("Value error, ")
    return f"{flag} ({ENV_PREFIX}{name.upper()}): {problem}, got {got}"
