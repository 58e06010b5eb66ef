"""The one description of the endpoints, held against the fields of vLLM's request models."""

from __future__ import annotations

import pytest

from server.request.endpoints import forms_of
from server.request.fields import SHARED, FieldKind
from server.request.rules import model_field_names
from server.request.tables import fields_by_name, kind_of_field, prompt_fields
from server.vllm.models import request_models
from server.wire import Endpoint
from tests.edges.corpus import BODIES, endpoint_of, large_fields

pytestmark = pytest.mark.engine

CONTENT = [FieldKind.MESSAGES, FieldKind.CONVERSATION, FieldKind.PROMPTS, FieldKind.TEXT]
CONTENT.append(FieldKind.TOKENS)


def test_every_field_that_may_be_large_says_what_it_holds() -> None:
    for form, name in large_fields():
        assert name in fields_by_name(endpoint_of(form)), "server/request/fields.py"


def test_no_field_is_described_that_no_model_has() -> None:
    names = set().union(*map(model_field_names, request_models().values()))
    # vLLM's models do not have them: the service ignores one, and works on the other itself.
    assert {row.path for row in SHARED} - names <= {"prompt_cache_key", "prediction"}


def test_every_endpoint_has_its_forms_and_prompts() -> None:
    models = request_models()
    assert set(BODIES) == set(models)
    for endpoint in Endpoint:
        forms = forms_of(endpoint, models)
        assert forms, endpoint
        fields = set().union(*(models[form].model_fields for form in forms))
        named = {*prompt_fields(endpoint)}
        assert named & fields, endpoint
        content = {name for name in fields if kind_of_field(endpoint, name) in CONTENT}
        # Text that goes with prompts of the kinds that are counted, blamed and looked into.
        assert content - named <= {"instruction", "documents", "prompt_embeds", "suffix"}, endpoint


@pytest.mark.parametrize("form", list(BODIES))
def test_valid_bodies_are_those_of_their_forms(form: str) -> None:
    from server.request.endpoints import request_form

    assert request_form(endpoint_of(form), BODIES[form]) == form
