"""The list of models, and one of them."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.conformance.target import error_of


def test_the_list_has_the_model(client: openai.OpenAI, model: str) -> None:
    listed = client.models.list()
    assert listed.object == "list"
    assert model in [item.id for item in listed]


def test_an_item_of_the_list_is_a_model_object(client: openai.OpenAI) -> None:
    item = next(iter(client.models.list()))
    assert item.object == "model"
    assert isinstance(item.created, int)
    assert item.owned_by


def test_a_model_can_be_retrieved(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught.value.code == "model_not_found"


async def test_the_async_client_lists_and_retrieves(
    async_client: openai.AsyncOpenAI, model: str
) -> None:
    assert model in [item.id async for item in await async_client.models.list()]
    assert (await async_client.models.retrieve(model)).id == model


def test_an_unknown_route_has_the_envelope(http: httpx.Client) -> None:
    answer = http.get("/v1/no-such-route")
    assert answer.status_code == 404
    error_of(answer)


def test_a_wrong_method_has_the_envelope(http: httpx.Client) -> None:
    answer = http.get("/v1/chat/completions")
    assert answer.status_code == 405
    error_of(answer)
