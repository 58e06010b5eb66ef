"""Settings of the backend, and the environment of child processes."""

from __future__ import annotations

from rbln_backend.settings import child_environ, resolve
