"""Table of the service's routes, and the forms of the requests that they accept.

The middleware reads the table: labels in metrics and logs, required keys, readiness. A route that
is missing in it is guarded like the API and has the label `other`.

Several endpoints accept prompts or conversations in one of several fields. The form of a request is
inferred from the fields present, so that errors are about that form only. Pure data and functions.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from starlette.types import Scope as AsgiScope

from server.errors import MissingFieldError, UnsupportedFieldError
from server.request.tables import error_field
from server.wire import Endpoint, JsonObject


class Scope(enum.Enum):
    """Key that a route requires, if the server has keys."""

    PROBE = "probe"
    """No key: orchestrators have none."""
    PAGE = "page"
    """No key: the console's files hold no data; its page prompts for a key."""
    METRICS = "metrics"
    """An API or admin key, unless `open_metrics`."""
    API = "api"
    """An API key."""
    ADAPTERS = "adapters"
    """Changes the served adapters: an admin key, or `UNGUARDED`."""
    ADMIN = "admin"
    """Takes the server out of service: an admin key, or `UNGUARDED`."""


NEVER_GUARDED = (Scope.PROBE, Scope.PAGE)
OPEN, KEY, ADMIN_KEY = "open", "API or admin key", "admin key"
UNGUARDED = "programs on this host"
"""Callers that the server accepts without admin keys: those on a loopback address."""

OPENINGS: Mapping[Scope, tuple[str, str, str]] = {
    Scope.PROBE: (OPEN, OPEN, OPEN),
    Scope.PAGE: (OPEN, OPEN, OPEN),
    Scope.METRICS: (OPEN, KEY, KEY),
    Scope.API: (OPEN, KEY, KEY),
    Scope.ADAPTERS: (UNGUARDED, f"{UNGUARDED}, with an API key", ADMIN_KEY),
    Scope.ADMIN: (UNGUARDED, UNGUARDED, ADMIN_KEY),
}
"""Requirement of each scope without keys, with API keys, and with admin keys too. For the
documents; `server.http.auth` decides, and tests compare the two."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route; `template` is its label.

    One that `needs_ready` is rejected unless the service is ready.
    """

    template: str
    scope: Scope
    needs_ready: bool = True
    prefix: str = ""
    """Prefix of the paths of a template with a parameter."""
    suffix: str = ""
    """Suffix of these paths."""
    admitted: bool = False
    """True if the route needs a permit of admission."""


INVOCATIONS = "/invocations"
"""The only route of SageMaker's hosts. vLLM answers a body by the first request model that accepts
it. Here the names of the fields decide, so that errors are those of one endpoint."""
_MODELS = ("/v1/models", "/v1/models/{model}")
_ANTHROPIC_VERSION = b"anthropic-version"
"""The header that every client of Anthropic's API sends."""
_RESPONSES = "/v1/responses/"

ROUTES: tuple[Route, ...] = (
    *(Route(p, Scope.PROBE, False) for p in ("/livez", "/readyz", "/startupz", "/health", "/ping")),
    Route("/", Scope.PAGE, needs_ready=False),
    Route("/console/{file}", Scope.PAGE, needs_ready=False, prefix="/console/"),
    *(Route(path, Scope.METRICS, needs_ready=False) for path in ("/metrics", "/version", "/load")),
    *(Route(path, Scope.API, needs_ready=False) for path in ("/v1/server_info", "/openapi.json")),
    Route("/v1/server_info/history", Scope.API, needs_ready=False),
    *(Route(endpoint.value, Scope.API, admitted=True) for endpoint in Endpoint),
    Route(INVOCATIONS, Scope.API, admitted=True),
    Route("/v1/files", Scope.API, needs_ready=False),
    Route("/v1/files/{file_id}/content", Scope.API, False, "/v1/files/", suffix="/content"),
    Route("/v1/files/{file_id}", Scope.API, False, "/v1/files/"),
    Route("/v1/batches", Scope.API, needs_ready=False),
    Route("/v1/batches/{batch_id}/cancel", Scope.API, False, "/v1/batches/", suffix="/cancel"),
    Route("/v1/batches/{batch_id}", Scope.API, False, "/v1/batches/"),
    Route("/v1/responses/{response_id}/cancel", Scope.API, False, _RESPONSES, suffix="/cancel"),
    Route(f"{_RESPONSES}{{response_id}}/input_items", Scope.API, False, _RESPONSES, "/input_items"),
    Route("/v1/responses/{response_id}", Scope.API, False, _RESPONSES),
    Route(_MODELS[0], Scope.API),
    Route("/tokenizer_info", Scope.API),
    Route(_MODELS[1], Scope.API, prefix="/v1/models/"),
    Route("/v1/structured_outputs/validate", Scope.API),
    Route("/v1/lora_adapters", Scope.API),
    Route("/v1/lora_adapters/{name}", Scope.API, prefix="/v1/lora_adapters/"),
    Route("/v1/load_lora_adapter", Scope.ADAPTERS),
    Route("/v1/unload_lora_adapter", Scope.ADAPTERS),
    Route("/admin/drain", Scope.ADMIN, needs_ready=False),
    Route("/admin/undrain", Scope.ADMIN, needs_ready=False),
    Route("/reset_prefix_cache", Scope.ADMIN),
    Route("/start_profile", Scope.ADMIN),
    Route("/stop_profile", Scope.ADMIN),
)
OTHER = Route("other", Scope.API, needs_ready=False)
"""Paths that do not exist."""

_BY_PATH = {route.template: route for route in ROUTES if not route.prefix}
_BY_PREFIX = [route for route in ROUTES if route.prefix]


def get_route(path: str) -> Route:
    """Return the route of a path; unknown paths share one."""
    route = _BY_PATH.get(path)
    if route is None:
        fitting = (r for r in _BY_PREFIX if path.startswith(r.prefix) and path.endswith(r.suffix))
        route = next(fitting, OTHER)
    return route


def route_path(scope: AsgiScope) -> str:
    """Return the path that the router matches, without a proxy's `root_path`."""
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    rest = path.removeprefix(root_path)
    return rest if rest == "" or rest.startswith("/") else path


def is_anthropic(route: Route, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return True for a request of Anthropic's API, which has its own error form.

    For models and unknown paths, which both APIs have, the client's header decides.
    """
    if route is not OTHER and route.template not in _MODELS:
        return route.template.startswith(Endpoint.MESSAGES.value)
    if path.startswith(f"{Endpoint.MESSAGES.value}/"):
        return True
    return any(name == _ANTHROPIC_VERSION for name, _ in headers)


def get_scope(route: Route, method: str) -> Scope:
    """Return the scope of a route for a method: removing an adapter needs more than reading it."""
    if route.template == "/v1/lora_adapters/{name}" and method not in ("GET", "HEAD"):
        return Scope.ADAPTERS
    return route.scope


def answers_in(endpoint: Endpoint, body: JsonObject) -> int:
    """Return the number of answers of a body, `n` for each prompt; 1 where `n` is invalid.

    A rendered request has one: nothing is generated.
    """
    if endpoint.renders:
        return 1
    n = body.get("n")
    answers = n if type(n) is int and n > 1 else 1
    if endpoint is Endpoint.COMPLETION or endpoint.pools:
        counted = error_field(endpoint, body)
        prompts = None if counted is None else body[counted]
        # Each is a text, a list of token ids or a list of messages.
        if isinstance(prompts, list) and prompts:
            first = prompts[0]
            answers *= 1 if isinstance(first, int) or is_message(first) else len(prompts)
    return answers


_SAME: Mapping[Endpoint, Endpoint] = {
    Endpoint.SCORE_V1: Endpoint.SCORE,
    Endpoint.RERANK_V1: Endpoint.RERANK,
    Endpoint.RERANK_V2: Endpoint.RERANK,
}
"""Paths that are other names of an endpoint."""

_SCORED_PAIRS = (("items", "score_items"), ("data_1", "score_data"), ("text_1", "score_text"))


def request_form(endpoint: Endpoint, body: JsonObject) -> str:
    """Return the name of the form: the endpoint's, with a suffix where it has several."""
    endpoint = _SAME.get(endpoint, endpoint)
    name = endpoint.name.lower()
    if endpoint is Endpoint.EMBEDDINGS:
        return name + _conversation_suffix(body)
    if endpoint in (Endpoint.TOKENIZE, Endpoint.POOLING, Endpoint.CLASSIFY):
        return f"{name}_chat" if "messages" in body else name
    if endpoint is Endpoint.SCORE:
        return next((form for field, form in _SCORED_PAIRS if field in body), name)
    return name


def get_forms(endpoint: Endpoint, known: Iterable[str]) -> list[str]:
    """Return the names of those `known` forms that are the endpoint's."""
    name = _SAME.get(endpoint, endpoint).name.lower()
    return [form for form in known if form == name or form.startswith(f"{name}_")]


def _conversation_suffix(body: JsonObject) -> str:
    """Return the suffix of embeddings of one or several conversations, in `messages` or `input`."""
    if "messages" in body:
        return "_chats" if isinstance(_first(body["messages"]), list) else "_chat"
    first = _first(body.get("input"))
    if is_message(first):
        return "_chat_input"
    return "_chats_input" if is_message(_first(first)) else ""


def is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None


ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
"""Header with the name of an adapter, in place of the field `model`."""

_SESSION_HEADER = "x-amzn-sagemaker-session-id"
_FORMS: Mapping[Endpoint, tuple[frozenset[str], ...]] = {
    Endpoint.CHAT: (frozenset({"messages"}),),
    Endpoint.COMPLETION: (frozenset({"prompt"}),),
    Endpoint.EMBEDDINGS: (frozenset({"input"}), frozenset({"messages"})),
    Endpoint.CLASSIFY: (frozenset({"input"}), frozenset({"messages"})),
    Endpoint.RERANK: (frozenset({"query", "documents"}),),
    Endpoint.SCORE: (
        frozenset({"queries", "documents"}),
        frozenset({"queries", "items"}),
        frozenset({"data_1", "data_2"}),
        frozenset({"text_1", "text_2"}),
    ),
    Endpoint.POOLING: (frozenset({"input"}), frozenset({"messages"})),
}
"""Fields by which an endpoint's bodies are recognised, in vLLM's order of the endpoints."""

INVOKED = tuple(_FORMS)


def invoked_endpoint(names: Collection[str], offered: Collection[Endpoint]) -> Endpoint:
    """Return the first offered endpoint that a body with the fields `names` fits.

    Raises `MissingFieldError`.
    """
    fields = frozenset(names)
    for endpoint, forms in _FORMS.items():
        if endpoint in offered and any(form <= fields for form in forms):
            return endpoint
    accepted = "; ".join(
        f"{' or '.join(_listed(form) for form in forms)} for {endpoint.value}"
        for endpoint, forms in _FORMS.items()
        if endpoint in offered
    )
    raise MissingFieldError(f"{INVOCATIONS} needs {accepted}.")


def check_session(headers: Mapping[str, str]) -> None:
    """Raise `UnsupportedFieldError` for a request of a session, which vLLM refuses by default."""
    if _SESSION_HEADER in headers:
        raise UnsupportedFieldError(
            f"The header {_SESSION_HEADER} is not supported: this server keeps no sessions; send "
            "the whole conversation."
        )


def _listed(form: frozenset[str]) -> str:
    return " and ".join(f"'{name}'" for name in sorted(form))
