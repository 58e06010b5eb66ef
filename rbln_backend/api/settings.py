"""Settings of the backend."""

from __future__ import annotations

from rbln_backend.settings import (
    HubSettings,
    given_options,
    hub_settings,
    options_of_vllm,
    resolve,
)
