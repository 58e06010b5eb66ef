"""Routes that only a server of several models has, and the requirement of each."""

from __future__ import annotations

from server.request.route_table import Route, Scope, route_of

SLEEP, WAKE_UP, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
_FRONT_ROUTES = {
    SLEEP: Route(SLEEP, Scope.ADMIN, gated=False),
    WAKE_UP: Route(WAKE_UP, Scope.ADMIN, gated=False),
    IS_SLEEPING: Route(IS_SLEEPING, Scope.API, gated=False),
}


def front_route_of(path: str) -> Route:
    """Return the route of a path on a server of several models."""
    return _FRONT_ROUTES.get(path) or route_of(path)
