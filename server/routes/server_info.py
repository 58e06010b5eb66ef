"""`/v1/server_info`: what runs here and how, in one JSON object; its schema is stable.

It answers in every phase, with what is known by then: sections that the engine has not told yet
are null. The engine tells them through files, so that a dead one is still described.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from rbln_backend.description import SECTIONS, read_descriptions
from server.lifecycle import Lifecycle
from server.settings import ServerSettings

SERVER_FIELDS: Mapping[str, str] = {
    "versions": "Versions by component: `version` (this service), `vllm`, `torch`, `python` and "
    "`platform`.",
    "status": "The body of `/readyz`.",
    "ranks": "Ranks that have told of themselves; the sections below are those of the first.",
    "graphs": "Every graph of the start-up: `name`, `state` (`pending`, `running`, `done`), "
    "`result` (`compiled`, `loaded` or null) and `seconds`; of several ranks the slowest.",
    "timings": "`uptime_s`; `ready_after_s`, null until ready; `phases`, the seconds of the "
    "engine's start-up phases so far.",
    "request_limits": "`max_body_bytes`, `max_messages`, `max_prompts` and `max_n` of a request.",
    "settings": "`server`: the HTTP server's settings; `rbln`: those of the device, null until "
    "the engine has told.",
}
"""Fields besides the engine's sections, and what they hold."""

_REQUEST_LIMITS = ("max_body_bytes", "max_messages", "max_prompts", "max_n")


def server_info_router(
    settings: ServerSettings, lifecycle: Lifecycle, versions: Mapping[str, str], run_dir: Path
) -> APIRouter:
    """Return the route; the engine's workers describe themselves in `run_dir`."""
    router = APIRouter()
    ours = settings.model_dump(mode="json")

    @router.get("/v1/server_info")
    async def server_info() -> JSONResponse:
        ranks = read_descriptions(run_dir)
        told: Mapping[str, Any] = ranks[0] if ranks else {}
        body: dict[str, Any] = {
            "versions": dict(versions),
            "status": lifecycle.status(),
            "ranks": len(ranks),
            **{name: told.get(name) for name in SECTIONS},
            "graphs": [dataclasses.asdict(graph) for graph in lifecycle.graph_progress],
            "timings": {
                "uptime_s": round(lifecycle.uptime_s, 3),
                "ready_after_s": lifecycle.ready_after_s,
                "phases": told.get("phases", {}),
            },
            "request_limits": {name: ours[name] for name in _REQUEST_LIMITS},
            "settings": {"server": ours, "rbln": told.get("settings")},
        }
        return JSONResponse(body)

    return router
