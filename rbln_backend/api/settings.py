"""Settings of the backend, and the environment of child processes."""

from __future__ import annotations

from rbln_backend.settings import HubSettings, child_environ, hub_settings, resolve
