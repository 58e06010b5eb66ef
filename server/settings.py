"""The HTTP server's settings: one frozen object, and the only reader of the environment here.

A setting comes from its flag (`--drain-timeout-s`), else from `RBLN_SERVE_DRAIN_TIMEOUT_S`,
else from the default declared here. What the engine does is vLLM's flags and `RblnConfig`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "RBLN_SERVE_"


class SettingsError(ValueError):
    """A setting is wrong; the message names flag, variable, value and what is allowed."""


class ServerSettings(BaseSettings):
    """Settings of one server process."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    host: str = Field("0.0.0.0", description="Address to listen on.")  # noqa: S104
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    ssl_keyfile: Path | None = Field(None, description="TLS private key; with --ssl-certfile.")
    ssl_certfile: Path | None = Field(None, description="TLS certificate chain.")
    drain_timeout_s: float = Field(
        25.0, ge=0, description="Seconds that in-flight requests get to finish after SIGTERM."
    )
    death_linger_s: float = Field(
        2.0,
        ge=0,
        description="Seconds to answer 503 with the reason after the engine died or could not "
        "start, before exiting.",
    )
    keep_alive_s: int = Field(
        75, ge=1, description="Seconds that an idle client connection is kept open."
    )
    max_body_bytes: int = Field(
        16 * 1024 * 1024, ge=1024, description="Largest accepted request body in bytes."
    )
    max_messages: int = Field(4096, ge=1, description="Most messages in one chat request.")
    max_prompts: int = Field(256, ge=1, description="Most prompts in one completion request.")
    max_n: int = Field(
        128, ge=1, description="Largest `n`; never more than the engine's max_num_seqs."
    )
    unknown_fields: Literal["reject", "warn"] = Field(
        "reject", description="What a request field that nothing acts on gets: 400 or a warning."
    )
    stream_commit_s: float = Field(
        5.0,
        ge=0,
        description="Seconds that a stream's status waits for its first event, so that an error "
        "found until then still gets its own status code.",
    )
    run_root: Path | None = Field(
        None, description="Where the run directory is made; unset takes the system's."
    )
    engine_start: Literal["forkserver", "spawn"] = Field(
        "forkserver",
        description="How the engine process starts; `spawn` is slower and needs no fork server.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe messages of the server's own log."
    )
    log_format: Literal["text", "json"] = Field("text", description="Form of the server's log.")


def load_settings(flags: Mapping[str, object], config_file: Mapping[str, object]) -> ServerSettings:
    """Build the settings: `flags` win over the environment, that over `config_file`.

    Raises `SettingsError` for an unknown variable of our prefix or a value that is not allowed.
    """
    _check_names()
    below = {k: v for k, v in config_file.items() if f"{ENV_PREFIX}{k.upper()}" not in _names()}
    try:
        settings = ServerSettings(**{**below, **flags})  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(dict(item)) for item in error.errors())) from None
    if (settings.ssl_keyfile is None) != (settings.ssl_certfile is None):
        raise SettingsError("--ssl-keyfile and --ssl-certfile are only useful together")
    return settings


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
    return f"{flag} ({ENV_PREFIX}{name.upper()}): {error['msg']}, got {error['input']!r}"
