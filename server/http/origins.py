"""Pages of other origins: the CORS headers."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from server.settings import ServerSettings


def allow_origins(app: FastAPI, settings: ServerSettings) -> None:
    """Allow pages of other origins to call the API and read the gate's errors."""
    if not settings.allowed_origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=("x-request-id", "request-id", "retry-after", "retry-after-ms"),
    )
