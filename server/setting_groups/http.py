"""Settings of connections, keys and requests."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import BaseModel, Field, SecretStr

from server.setting_groups.values import (
    CertificateWish,
    OptionalPath,
    Secrets,
    VolatileLines,
    Words,
)


class ListenSettings(BaseModel):
    """Where the server listens, TLS, what browsers may do."""

    @property
    def listens_locally(self) -> bool:
        """Whether the address to listen on is one that other hosts cannot reach."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    root_path: str = Field(
        "",
        pattern=r"^(/[^/?#\s]+)*$",
        description="Path prefix below which a proxy in front serves this, such as /llm.",
    )
    ssl_keyfile: OptionalPath = Field(None, description="TLS private key; with --ssl-certfile.")
    ssl_certfile: OptionalPath = Field(None, description="TLS certificate chain.")
    ssl_keyfile_password: SecretStr | None = Field(
        None, description="Password of the TLS private key."
    )
    ssl_ca_certs: OptionalPath = Field(
        None, description="Authorities that client certificates are checked against."
    )
    ssl_cert_reqs: CertificateWish = Field(
        "none", description="Whether clients show a certificate of --ssl-ca-certs."
    )
    ssl_ciphers: str | None = Field(None, description="OpenSSL cipher list for TLS 1.2.")
    enable_ssl_refresh: bool = Field(
        False, description="Load the TLS certificate again when its file changes."
    )
    allowed_origins: Words = Field(
        (), description="Origins whose pages may call this server (CORS); `*` is any. None: off."
    )
    allowed_methods: Words = Field(
        ("GET", "POST", "DELETE"), description="Methods that such a page may use."
    )
    allowed_headers: Words = Field(
        ("*",), description="Request headers that such a page may send; `*` is any."
    )
    allow_credentials: bool = Field(
        False, description="Whether such a page may send cookies; not with the origin `*`."
    )


class ConnectionSettings(BaseModel):
    """How many connections clients may have, and how long each may keep the server waiting."""

    max_connections: int = Field(
        4096,
        ge=1,
        description="Most client connections at once; more get 503. Fewer where the process may "
        "not open as many files.",
    )
    max_connections_per_client: int | None = Field(
        None,
        ge=1,
        description="Most connections from one IPv4 address or IPv6 /64 network; more get 429. "
        "Unset: three quarters of --max-connections, so that no address keeps all others out.",
    )
    max_header_bytes: int = Field(
        64 * 1024, ge=1024, description="Largest request line and headers in bytes; then 431."
    )
    header_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds that a client may take to send a request's headers, and for the "
        "TLS handshake; then 408.",
    )
    keep_alive_s: int = Field(
        75, ge=1, description="Seconds that an idle client connection is kept open."
    )
    linger_s: float = Field(
        2.0,
        gt=0,
        description="Seconds in which a client may still send a body after it has got its answer; "
        "then the connection is closed.",
    )
    linger_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        description="Bytes that a client may still send then; they are dropped.",
    )
    write_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds that a client may take nothing of what is to be sent to it; then its "
        "request is aborted.",
    )


class AccessSettings(BaseModel):
    """Who may call what."""

    api_key: Secrets = Field(
        (),
        description="Keys that open the API; `name=key` names one in metrics and logs. Better in "
        "a file or in RBLN_SERVE_API_KEY: flags show in the process list.",
    )
    api_key_file: OptionalPath = Field(
        None,
        description="File of keys, one `name=key` or `name=sha256:<hex digest>` a line; read "
        "again when it changes.",
    )
    admin_key: Secrets = Field(
        (), description="Keys that open /admin and the loading of adapters; forms as --api-key."
    )
    admin_key_file: OptionalPath = Field(
        None, description="File of such keys; read again when it changes."
    )
    allow_unguarded_changes: bool = Field(
        False,
        description="Without admin keys, let whoever may use the API load and unload adapters, and "
        "programs on this host use /admin, also where --host is no loopback address.",
    )
    console: bool = Field(True, description="Serve the console, a page without data, at /.")
    open_metrics: bool = Field(
        False, description="Serve /metrics and /version without a key even when keys are set."
    )


class AdmissionSettings(BaseModel):
    """How much work is taken, and how large a request may be."""

    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Most answers, counting each of `n`, that run or wait at once; more get 429. "
        "Unset: what the engine runs, its max_num_seqs, and as many again, at least 32, that wait.",
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Prompt tokens that may wait for their prefill; beyond it requests get 429. "
        "Unset: max_num_seqs times max_model_len, for each data-parallel rank, at least 16384; any "
        "number where the model pools.",
    )
    max_queue_s: float = Field(
        60.0,
        ge=0,
        description="Seconds that a request may wait for its turn on the device; then 503. 0: "
        "any time.",
    )
    max_request_s: float = Field(
        0.0,
        ge=0,
        description="Seconds that a request may take in all; a client's X-Request-Timeout-Ms may "
        "ask for less. 0: any time.",
    )
    body_timeout_s: float = Field(
        30.0, gt=0, description="Seconds that a client may take to send a request's body."
    )
    max_body_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, description="Largest accepted request body in bytes."
    )
    max_json_depth: int = Field(
        64, ge=4, le=190, description="Deepest nesting of objects and arrays in a request body."
    )
    max_messages: int = Field(
        2048, ge=1, description="Most messages, or items of an `input`, in one request."
    )
    max_tools: int = Field(256, ge=1, description="Most tools that one request declares.")
    max_text_chars: int | None = Field(
        None,
        ge=1024,
        description="Most characters of one text in a prompt. Unset: 16 for each token of the "
        "model's context, at least 1048576.",
    )
    max_prompts: int = Field(256, ge=1, description="Most prompts in one completion request.")
    max_n: int = Field(
        128, ge=1, description="Largest `n`; never more than the engine's max_num_seqs."
    )
    max_stop: int = Field(4, ge=1, le=64, description="Most `stop` strings of one request.")
    max_logit_bias: int = Field(1024, ge=1, description="Most entries of `logit_bias`.")
    read_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds that a large body may take to be parsed and checked, and as many "
        "again for its chat template to be rendered; then 429.",
    )
    read_workers: int = Field(
        1, ge=1, le=16, description="Processes that parse and check large bodies."
    )
    unknown_fields: Literal["reject", "warn"] = Field(
        "reject", description="What a request field that nothing acts on gets: 400 or a warning."
    )
    volatile_lines: VolatileLines = Field(
        (),
        description="Lines of system prompts that change from request to request, at which every "
        "prefix match would end: `billing`, Claude Code's, is dropped (on /v1/messages always); "
        "`clock`, a line with the date or time, is moved to the end of the conversation.",
    )
    default_tool_prompt: bool = Field(
        True,
        description="Show tools to a model whose chat template shows none, in Hermes' form; "
        "--no-default-tool-prompt refuses requests with tools for such a model.",
    )
    stream_commit_s: float = Field(
        5.0,
        ge=0,
        description="Seconds that a stream's status waits for its first event, so that an error "
        "found until then still gets its own status code.",
    )


class SchemaSettings(BaseModel):
    """How large a grammar of a structured output may be, and how long its compilation takes."""

    schema_max_bytes: int = Field(
        64 * 1024, ge=256, description="Largest schema, regex or grammar in bytes."
    )
    schema_max_depth: int = Field(32, ge=2, le=128, description="Deepest nesting of a schema.")
    schema_max_nodes: int = Field(
        4096, ge=16, description="Most objects, arrays and values of a schema."
    )
    schema_max_enum: int = Field(1024, ge=1, description="Most values of one `enum` or `choice`.")
    schema_max_pattern: int = Field(
        1024, ge=16, description="Longest `pattern` or regex in characters."
    )
    schema_compile_cpu_s: float = Field(
        5.0,
        gt=0,
        description="Seconds of processor time that a grammar may take to compile; then 400. One "
        "that the machine cannot try in ten times as long is 503 with Retry-After.",
    )
    schema_workers: int = Field(
        1, ge=1, le=16, description="Processes that try grammars before the engine gets them."
    )
    schema_cache_entries: int = Field(
        1024, ge=1, description="Verdicts on grammars that are remembered."
    )


class AdapterSettings(BaseModel):
    """Where LoRA adapters may be loaded from while serving."""

    lora_root: OptionalPath = Field(
        None,
        description="Directory below which adapters may be loaded over HTTP. Unset: only what "
        "--lora-modules names.",
    )
    lora_state_file: OptionalPath = Field(
        None,
        description="File that remembers the loaded adapters over a restart. Unset: "
        "`adapters.json` in --lora-root, if it can be written.",
    )
    lora_base_names: Words = Field(
        (),
        description="Further names that an adapter's base_model_name_or_path may end with; `*` is "
        "any. MODEL's own and its served names always may.",
    )
