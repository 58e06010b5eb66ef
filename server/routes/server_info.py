"""`/v1/server_info`: versions, state and configuration of this server, with a stable schema.

`/v1/server_info/history` has the traffic of the last minutes.

It responds in every phase; sections that the engine has not yet reported are null. The engine
reports through files, so that a failed engine is still described.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from rbln_backend.api.names import SECTIONS, read_descriptions
from server import bounds
from server.errors import InvalidValueError, describe
from server.frontend import Frontend
from server.http.openapi import DescribedRoute, failing
from server.lifecycle import Lifecycle
from server.observability.traffic import PERIOD_S, BucketAdvice, History, Sample
from server.request.record import get_record
from server.routes.models import ShownPaths
from server.settings import ServerSettings
from server.structured_outputs.constraint import BACKEND
from server.wire import JsonObject

_NUMBER = re.compile("[0-9]{1,12}")

SERVER_FIELDS: Mapping[str, str] = {
    "versions": "Versions by component: `version` (this service), `vllm`, `torch`, `python` and "
    "`platform`.",
    "status": "The body of `/readyz`.",
    "ranks": "Number of ranks that have reported; the sections below are those of the first.",
    "graphs": "Every graph of the start-up: `name`, `state` (`pending`, `running`, `done`), "
    "`result` (`compiled`, `loaded` or null) and `seconds`; of several ranks the slowest.",
    "bucket_advice": "By phase (`prefill`, `decode`) the advice of `rbln-serve tune` on the sizes "
    "that ran in this configuration, including earlier starts: `current` and `suggested` "
    "sizes, the predicted `saving` of step time, `noise` (where less is saved, the current sizes "
    "are suggested) and `setting`; null while nothing is recorded, about a minute.",
    "timings": "`uptime_s`; `ready_after_s`, null until ready; `phases`, the seconds of the "
    "engine's start-up phases so far.",
    "request_limits": "Limits of one request: `max_body_bytes`, `max_json_depth`, "
    "`max_messages`, `max_prompts`, `max_tools`, `max_n`, `max_stop`, "
    "`max_logit_bias`, `max_request_s` and `max_queue_s`.",
    "structured_outputs": "`backend`, vLLM's name of it, and the limits of a grammar: "
    "`schema_max_bytes`, `schema_max_depth`, `schema_max_nodes`, `schema_max_enum`, "
    "`schema_max_pattern`, `schema_compile_cpu_s`; `undeclared_properties`, the rule of schemas.",
    "tools": "How tools reach the model; null until ready. `prompt`: `template` (the chat template "
    "shows them), `default` (the default tool prompt does) or `none` (requests with tools are "
    "refused); `parser`, which reads calls, or null; `reason`, why it is that prompt.",
    "settings": "`server`: the HTTP server's settings; `rbln`: those of the device, null until "
    "the engine has reported.",
}
"""Fields besides the engine's sections, and their contents."""

_REQUEST_LIMITS = ("max_body_bytes", "max_n", "max_stop", "max_request_s", "max_queue_s")
_REQUEST_BOUNDS = ("max_json_depth", "max_messages", "max_prompts", "max_tools", "max_logit_bias")
_SCHEMA_SETTINGS = ("schema_max_bytes", "schema_compile_cpu_s", "undeclared_properties")
_SCHEMA_BOUNDS = ("schema_max_depth", "schema_max_nodes", "schema_max_enum", "schema_max_pattern")


def server_info_router(
    settings: ServerSettings,
    lifecycle: Lifecycle,
    versions: Mapping[str, str],
    run_dir: Path,
    advice: BucketAdvice,
    shown: ShownPaths,
    frontend: Callable[[], Frontend],
) -> APIRouter:
    router = APIRouter(route_class=DescribedRoute)
    server_settings = settings.model_dump(mode="json")

    @router.get("/v1/server_info", response_model=JsonObject)
    async def server_info(request: Request) -> JSONResponse:
        """Return versions, state and configuration; see docs/server_info.md."""
        ranks = read_descriptions(run_dir)
        report: Mapping[str, Any] = ranks[0] if ranks else {}
        body: dict[str, Any] = {
            "versions": dict(versions),
            "status": lifecycle.status(),
            "ranks": len(ranks),
            # Of the first rank that has it: a pipeline's last stage has draft models.
            **{
                name: next((rank[name] for rank in ranks if rank.get(name) is not None), None)
                for name in SECTIONS
            },
            "graphs": [dataclasses.asdict(graph) for graph in lifecycle.graph_progress],
            "bucket_advice": await advice.of(report.get("buckets")),
            "timings": {
                "uptime_s": round(lifecycle.uptime_s, 3),
                "ready_after_s": lifecycle.ready_after_s,
                "phases": report.get("phases", {}),
            },
            "request_limits": {
                **{name: server_settings[name] for name in _REQUEST_LIMITS},
                **{name: getattr(bounds, name.upper()) for name in _REQUEST_BOUNDS},
            },
            "structured_outputs": {
                "backend": BACKEND,
                **{name: server_settings[name] for name in _SCHEMA_SETTINGS},
                **{name: getattr(bounds, name.upper()) for name in _SCHEMA_BOUNDS},
            },
            "tools": frontend().tools.to_dict() if lifecycle.started else None,
            "settings": {"server": server_settings, "rbln": report.get("settings")},
        }
        return JSONResponse(
            body if get_record(request.scope).caller.is_admin else shown.every(body)
        )

    return router


class HistoryAnswer(TypedDict):
    """Body of `/v1/server_info/history`."""

    period_s: float
    samples: list[Sample]


def history_router(history: History) -> APIRouter:
    router = APIRouter(route_class=DescribedRoute)

    @router.get(
        "/v1/server_info/history",
        response_model=HistoryAnswer,
        responses=failing(InvalidValueError),
    )
    async def samples(after: str = "0") -> JSONResponse:
        """Return the traffic of the last minutes; see docs/server_info.md."""
        if not _NUMBER.fullmatch(after):
            raise InvalidValueError(
                f"after: must be the number of a sample, got {describe(after)}", param="after"
            )
        answer = [dataclasses.asdict(sample) for sample in history.after(int(after))]
        return JSONResponse({"period_s": PERIOD_S, "samples": answer})

    return router
