"""The signatures say what torch says: no name that it lacks, no argument that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_backend.compiler.programs.operators import operator_name, signatures_of, target_of
from rbln_backend.compiler.programs.python_signatures import BY_KIND
from rbln_backend.compiler.programs.signatures import Parameter, Signature

NAMES = [f"{kind}.{name}" for kind, table in BY_KIND.items() for name in table]


def samples(kind: str) -> list[Any]:
    """Values of a type that a parameter may have."""
    tensor = torch.ones(2, 2)
    return {
        "tensor": [tensor],
        "tensors": [[tensor, tensor], (tensor, tensor)],
        "int": [1],
        "ints": [[1, 1], (1, 1)],
        "number": [1, True],
        "float": [1, 0.5],
        "bool": [True],
        "str": ["floor"],
        "dtype": [torch.float32],
        "device": [torch.device("cpu")],
        "memory_format": [torch.contiguous_format],
        "index": [0, (0, slice(0, 1)), (..., None), slice(None), tensor.bool(), [0, 1]],
        "slice": [slice(0, 1)],
        "none": [None],
    }[kind]


def example(parameter: Parameter) -> Any:
    return samples(parameter.types[0])[0]


def calls(signature: Signature) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """The required arguments alone, then with every value of every parameter in turn."""
    required = [x for x in signature.parameters if x.is_required]
    yield [example(x) for x in required if not x.by_name], {}
    for parameter in signature.parameters:
        for value in [value for kind in parameter.types for value in samples(kind)]:
            given = [value if x is parameter else example(x) for x in required]
            if not parameter.is_required:
                yield given, {parameter.name: value}
                continue
            yield given, {}
            if parameter.is_spread:
                place = required.index(parameter)
                yield [*given[:place], *value, *given[place + 1 :]], {}


@pytest.mark.parametrize("name", NAMES)
def test_torch_takes_what_a_signature_allows(name: str) -> None:
    op, target = target_of(name)
    function = getattr(Tensor, str(target)) if op == "call_method" else target
    assert callable(function)
    for signature in signatures_of(name):
        for arguments, keywords in calls(signature):
            try:
                function(*arguments, **keywords)
            except (RuntimeError, IndexError, ValueError):
                continue  # The numbers do not fit. A TypeError is about names and types.
            except TypeError as error:
                assert "only implemented on integer" in str(error)


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_is_stored_under_one_name(name: str) -> None:
    op, target = target_of(name)
    stored = operator_name(op, target)
    assert stored is not None
    # Some functionals are the C++ function behind them.
    assert target_of(stored) == (op, target)
