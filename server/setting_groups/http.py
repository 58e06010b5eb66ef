"""Settings of connections, keys and requests."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import BaseModel, Field, SecretStr

from server.setting_groups.values import (
    ClientCertificates,
    OptionalPath,
    Secrets,
    Words,
)


class ListenSettings(BaseModel):
    """Listening address, TLS and CORS."""

    @property
    def listens_locally(self) -> bool:
        """Return whether clients are programs on this host: a loopback address or a socket."""
        if self.uds is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 picks a free one.")
    uds: OptionalPath = Field(
        None,
        description="Unix socket to listen on instead of --host and --port; only this user may "
        "connect.",
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[^/?#\s]+)*$",
        description="Path prefix that a reverse proxy strips, such as /llm.",
    )
    ssl_keyfile: OptionalPath = Field(None, description="TLS private key; with --ssl-certfile.")
    ssl_certfile: OptionalPath = Field(None, description="TLS certificate chain.")
    ssl_keyfile_password: SecretStr | None = Field(
        None, description="Password of the TLS private key."
    )
    ssl_ca_certs: OptionalPath = Field(
        None, description="Certificate authorities that client certificates are checked against."
    )
    ssl_cert_reqs: ClientCertificates = Field(
        "none",
        description="Client certificates, checked against --ssl-ca-certs: none, optional "
        "or required.",
    )
    ssl_ciphers: str | None = Field(None, description="OpenSSL cipher list for TLS 1.2.")
    enable_ssl_refresh: bool = Field(
        False, description="Reload the TLS certificate when its file changes."
    )
    allowed_origins: Words = Field(
        (), description="Origins allowed by CORS; `*` allows all. Empty: CORS is off."
    )
    allowed_methods: Words = Field(
        ("GET", "POST", "DELETE"), description="Methods allowed by CORS."
    )
    allowed_headers: Words = Field(
        ("*",), description="Request headers allowed by CORS; `*` allows all."
    )
    allow_credentials: bool = Field(
        False, description="Allow cookies in CORS requests; not together with the origin `*`."
    )


class ConnectionSettings(BaseModel):
    """Limits of client connections in number, bytes and time."""

    max_connections: int = Field(
        4096,
        ge=1,
        description="Maximum number of client connections; more get 503. Fewer if the process may "
        "not open as many files.",
    )
    max_connections_per_client: int | None = Field(
        None,
        ge=1,
        description="Maximum number of connections from one IPv4 address or IPv6 /64 network; more "
        "get 429. Unset: three quarters of --max-connections.",
    )
    max_header_bytes: int = Field(
        64 * 1024,
        ge=1024,
        description="Maximum size of request line and headers in bytes; above: 431.",
    )
    keep_alive_s: int = Field(
        120,
        ge=1,
        description="Seconds for which an idle client connection stays open: longer than clients "
        "keep one that they use again (Go's and llm-d's sidecar 90 s), else they get a reset.",
    )


class AccessSettings(BaseModel):
    """API keys, admin keys and unauthenticated routes."""

    api_key: Secrets = Field(
        (),
        description="API keys; `name=key` sets the name in metrics and logs. Prefer a file or "
        "RBLN_SERVE_API_KEY: flags are visible in the process list.",
    )
    api_key_file: OptionalPath = Field(
        None,
        description="File of API keys, one `name=key` or `name=sha256:<hex digest>` per line; "
        "reloaded when it changes.",
    )
    admin_key: Secrets = Field(
        (), description="Keys for /admin and for loading adapters; same format as --api-key."
    )
    admin_key_file: OptionalPath = Field(
        None, description="File of admin keys; reloaded when it changes."
    )
    key_max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Maximum number of requests in flight of one API key; then 429. "
        "`name[in-flight:N]=key` sets another one. Unset: no limit but --max-in-flight.",
    )
    key_requests_per_minute: int | None = Field(
        None,
        ge=1,
        description="Maximum number of requests per minute of one API key; then 429. "
        "`name[rpm:N]=key` sets another one. Unset: no limit.",
    )
    key_tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens per minute of one API key, of prompts and answers; "
        "then 429. `name[tpm:N]=key` sets another one. Unset: no limit.",
    )
    allow_unguarded_changes: bool = Field(
        False,
        description="Without admin keys, allow every API client to load and unload adapters, and "
        "programs on this host to use /admin, even if --host is no loopback address.",
    )
    console: bool = Field(True, description="Serve the console, a page without data, at /.")
    open_metrics: bool = Field(
        False, description="Serve /metrics and /version without a key even if keys are set."
    )


class AdmissionSettings(BaseModel):
    """Limits of concurrent work and of the size of a request."""

    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Maximum number of running and waiting sequences, counting each of `n`; then "
        "429. Unset: max_num_seqs that run, and as many again, at least 32, that wait.",
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum number of prompt tokens that wait for prefill; then requests get 429. "
        "Unset: max_num_seqs times max_model_len per data-parallel rank, at least 16384; unlimited "
        "for pooling models.",
    )
    max_queue_s: float = Field(
        60.0,
        ge=0,
        description="Seconds for which a request may wait in the queue; then 503. 0: no limit.",
    )
    prefill_policy: Literal["shortest", "fcfs"] | None = Field(
        None,
        description="Order of prompts: `shortest` computes the prompt with the fewest tokens left "
        "first, `fcfs` one prompt after the other. Unset: shortest; fcfs for pooling models.",
    )
    max_num_partial_prefills: int | None = Field(
        None,
        ge=1,
        description="Maximum number of prompts that are partly computed at the same time; prompts "
        "of at most a chunk begin beside them. Unset: 4.",
    )
    max_request_s: float = Field(
        0.0,
        ge=0,
        description="Timeout of a request in seconds; X-Request-Timeout-Ms can lower it. 0: no "
        "limit.",
    )
    max_body_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, description="Maximum size of a request body in bytes."
    )
    max_n: int = Field(
        128, ge=1, description="Maximum `n`; the engine's max_num_seqs is a second limit."
    )
    max_stop: int = Field(
        4, ge=1, le=64, description="Maximum number of `stop` strings in one request."
    )
    unknown_fields: Literal["reject", "warn"] = Field(
        "reject", description="Treatment of unknown request fields: 400 or a logged warning."
    )
    default_tool_prompt: bool = Field(
        True,
        description="Add tools in Hermes format to the prompt if the chat template does not render "
        "tools; --no-default-tool-prompt rejects requests with tools for such a model.",
    )
    sanitize_control_tokens: bool = Field(
        True,
        description="Tokenize the text of a control token in a conversation as ordinary text; "
        "--no-sanitize-control-tokens lets clients write turns and markup, as vLLM does.",
    )


class SchemaSettings(BaseModel):
    """Limits of the size and the compilation time of grammars."""

    undeclared_properties: Literal["omit", "allow"] = Field(
        "omit",
        description="Rule of schemas: `omit`: objects of which properties are listed have no "
        "others, unless the schema has `additionalProperties`; `allow`: others may follow.",
    )
    schema_max_bytes: int = Field(
        64 * 1024, ge=256, description="Maximum size of a schema, regex or grammar in bytes."
    )
    schema_compile_cpu_s: float = Field(
        5.0,
        gt=0,
        description="Processor seconds for compiling a grammar; above: 400. A grammar that takes "
        "ten times as long on the clock gets 503 with Retry-After.",
    )
    schema_workers: int = Field(
        1, ge=1, le=16, description="Processes that compile grammars before the engine does."
    )


class AdapterSettings(BaseModel):
    """Locations and base model names of LoRA adapters loaded at run time."""

    lora_root: OptionalPath = Field(
        None,
        description="Directory below which adapters may be loaded over HTTP. Unset: only those of "
        "--lora-modules.",
    )
    lora_state_file: OptionalPath = Field(
        None,
        description="File that lists the loaded adapters for a restart. Unset: `adapters.json` in "
        "--lora-root, if writable.",
    )
    lora_base_names: Words = Field(
        (),
        description="Further accepted endings of an adapter's base_model_name_or_path; `*` accepts "
        "all. MODEL and its served names are always accepted.",
    )
