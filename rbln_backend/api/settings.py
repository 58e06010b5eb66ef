"""Settings of the backend, and the environment of child processes."""

from __future__ import annotations

from rbln_backend.settings import (
    HubSettings,
    child_environ,
    given_options,
    hub_settings,
    options_of_vllm,
    resolve,
)
