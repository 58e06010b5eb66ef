"""vLLM's routes of its sleep mode, for one model of several: `/sleep`, `/wake_up`, `/is_sleeping`.

Both of vLLM's levels drop the weights and the KV cache here; graphs stay in the store. A request
for a sleeping model wakes it.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from server.errors import InvalidValueError, UnsupportedOperationError, describe
from server.http.openapi import DescribedRoute
from server.model_pool.choice.model_choice import ModelChoice
from server.model_pool.front.routes import IS_SLEEPING, SLEEP, WAKE_UP
from server.model_pool.pool import ModelPool
from server.model_pool.pooled_model import ModelState, PooledModel
from server.settings import ServerSettings

_LEVELS, _MODES = ("1", "2"), ("wait",)
_WAKE_S = 600.0


def pool_router(pool: ModelPool, choice: ModelChoice, settings: ServerSettings) -> APIRouter:
    """Return the routes; callers are authorized by the middleware."""
    router = APIRouter(route_class=DescribedRoute)

    def chosen(name: str | None) -> list[PooledModel]:
        if name is not None:
            return [choice.named(name)]
        return [model for model in pool.models.values() if not model.entry.pinned]

    @router.post(SLEEP)
    async def sleep(level: str = "1", mode: str = "wait", model: str | None = None) -> JSONResponse:
        """Unload a model, or all that are not pinned; 202 while its requests still run."""
        _require("level", level, _LEVELS)
        _require("mode", mode, _MODES)
        models = chosen(model)
        if pinned := [one.name for one in models if one.entry.pinned]:
            raise UnsupportedOperationError(f"The model {pinned[0]!r} is pinned.")
        wait_s = settings.drain_timeout_s
        asleep = await asyncio.gather(*(pool.sleep(one, wait_s) for one in models))
        body = {one.name: one.state.value for one in models}
        return JSONResponse(body, status_code=200 if all(asleep) else 202)

    @router.post(WAKE_UP)
    async def wake_up(model: str | None = None, tags: str | None = None) -> JSONResponse:
        """Load a model and answer once it is ready."""
        if tags is not None:
            raise InvalidValueError(
                "'tags' is not supported: a model wakes as a whole.", param="tags"
            )
        if model is None:
            raise InvalidValueError(
                "'model' is missing: name the model to load, as in /wake_up?model=NAME.",
                param="model",
            )
        woken = choice.named(model)
        await pool.wake(woken, _WAKE_S)
        return JSONResponse({woken.name: woken.state.value})

    @router.get(IS_SLEEPING)
    async def is_sleeping(model: str | None = None) -> dict[str, bool]:
        """Return whether a model, or every model, is asleep."""
        models = list(pool.models.values()) if model is None else [choice.named(model)]
        return {"is_sleeping": all(one.state is ModelState.ASLEEP for one in models)}

    return router


def _require(name: str, value: str, accepted: tuple[str, ...]) -> None:
    """Raise `InvalidValueError` for a value of the query that is not accepted."""
    if value not in accepted:
        raise InvalidValueError(
            f"{name!r} must be {' or '.join(accepted)}, got {describe(value)}.", param=name
        )
