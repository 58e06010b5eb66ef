"""Endpoint that `/invocations`, the only route of SageMaker's hosts, answers a body with.

vLLM takes the first request model of its endpoints that accepts the body. Here the names of the
fields decide, so that errors are those of one endpoint. Pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from server.errors import MissingFieldError, UnsupportedFieldError
from server.wire.endpoint import Endpoint

INVOCATIONS = "/invocations"
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
        *(frozenset({"queries", "documents"}), frozenset({"queries", "items"})),
        *(frozenset({"data_1", "data_2"}), frozenset({"text_1", "text_2"})),
    ),
    Endpoint.POOLING: (frozenset({"input"}), frozenset({"messages"})),
}
"""Fields by which an endpoint's bodies are recognised, in vLLM's order of the endpoints."""

INVOKED = tuple(_FORMS)


def invoked_endpoint(names: Collection[str], offered: Collection[Endpoint]) -> Endpoint:
    """Return the first offered endpoint that a body with the fields `names` fits.

    Raises `MissingFieldError`.
    """
    given = frozenset(names)
    for endpoint, forms in _FORMS.items():
        if endpoint in offered and any(form <= given for form in forms):
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
