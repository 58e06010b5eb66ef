"""Endpoints of /invocations, in vLLM's order for the tasks of a model."""

from __future__ import annotations

import ast
import inspect

import pytest

from server.errors import MissingFieldError
from server.request.endpoints import INVOKED, invoked_endpoint
from server.wire import Endpoint

POOLING = frozenset({Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE, Endpoint.POOLING})


@pytest.mark.parametrize(
    ("names", "offered", "expected"),
    [
        ({"messages", "model"}, {Endpoint.CHAT, Endpoint.COMPLETION}, Endpoint.CHAT),
        ({"prompt"}, {Endpoint.CHAT, Endpoint.COMPLETION}, Endpoint.COMPLETION),
        ({"messages", "prompt"}, {Endpoint.CHAT, Endpoint.COMPLETION}, Endpoint.CHAT),
        ({"input"}, POOLING, Endpoint.EMBEDDINGS),
        ({"messages"}, POOLING, Endpoint.EMBEDDINGS),
        ({"query", "documents"}, POOLING, Endpoint.RERANK),
        ({"queries", "documents"}, POOLING, Endpoint.SCORE),
        ({"text_1", "text_2"}, POOLING, Endpoint.SCORE),
        ({"input"}, {Endpoint.CLASSIFY, Endpoint.POOLING}, Endpoint.CLASSIFY),
        ({"input"}, {Endpoint.POOLING}, Endpoint.POOLING),
    ],
)
def test_fields_decide(names: set[str], offered: set[Endpoint], expected: Endpoint) -> None:
    assert invoked_endpoint(names, offered) is expected


def test_an_error_names_the_fields_of_the_offered_endpoints() -> None:
    with pytest.raises(MissingFieldError) as caught:
        invoked_endpoint({"input"}, {Endpoint.CHAT, Endpoint.COMPLETION})
    assert caught.value.message == (
        "/invocations needs 'messages' for /v1/chat/completions; 'prompt' for /v1/completions."
    )


@pytest.mark.engine
def test_the_order_is_that_of_vllm() -> None:
    from vllm.entrypoints.generate.factories import get_generate_invocation_types
    from vllm.entrypoints.pooling.factories import get_pooling_invocation_types

    serving = {
        "create_chat_completion": Endpoint.CHAT,
        "create_completion": Endpoint.COMPLETION,
        "create_embedding": Endpoint.EMBEDDINGS,
        "create_classify": Endpoint.CLASSIFY,
        "do_rerank": Endpoint.RERANK,
        "create_score": Endpoint.SCORE,
        "create_pooling": Endpoint.POOLING,
    }
    order = [
        serving[node.elts[1].elts[1].id]  # type: ignore[attr-defined]
        for function in (get_generate_invocation_types, get_pooling_invocation_types)
        for node in ast.walk(ast.parse(inspect.getsource(function)))
        if isinstance(node, ast.Tuple)
        and len(node.elts) == 2
        and isinstance(node.elts[1], ast.Tuple)
    ]
    assert tuple(order) == INVOKED
