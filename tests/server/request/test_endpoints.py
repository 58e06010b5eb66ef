"""The one description of the endpoints, held against the fields of vLLM's request models."""

from __future__ import annotations

import pytest

from server.request.endpoints import FIELD_KINDS, PROMPTS, FieldKind, forms_of, kind_of_field
from server.vllm.handlers import request_models
from server.wire.endpoint import Endpoint
from tests.edges.corpus import BODIES, endpoint_of, large_fields

pytestmark = pytest.mark.engine

CONTENT = (FieldKind.CONVERSATION, FieldKind.PROMPTS, FieldKind.TOKENS)


def test_every_field_that_may_be_large_says_what_it_holds() -> None:
    forgotten = {(form, name) for form, name in large_fields() if name not in FIELD_KINDS}
    assert forgotten == set(), "name them in server/request/endpoints.py"


def test_no_field_is_described_that_no_model_has() -> None:
    names = {name for _, name in large_fields()}
    # vLLM's models do not have them; the service drops one as a client's own label, and works on
    # the other itself.
    assert set(FIELD_KINDS) - names <= {"prompt_cache_key", "prediction"}


def test_every_endpoint_has_its_forms_and_prompts() -> None:
    models = request_models()
    assert set(BODIES) == set(models)
    for endpoint in Endpoint:
        forms = forms_of(endpoint, models)
        assert forms, endpoint
        fields = set().union(*(models[form].model_fields for form in forms))
        named = {field.name for field in PROMPTS[endpoint]}
        assert named & fields, endpoint
        content = {name for name in fields if kind_of_field(endpoint, name) in CONTENT}
        # Text that goes with prompts of the kinds that are counted, blamed and looked into.
        assert content - named <= {"instruction", "documents", "prompt_embeds", "suffix"}, endpoint


@pytest.mark.parametrize("form", list(BODIES))
def test_valid_bodies_are_those_of_their_forms(form: str) -> None:
    from server.request.endpoints import request_form

    assert request_form(endpoint_of(form), BODIES[form]) == form
