"""The operators that a stored program may name."""

from __future__ import annotations

import pytest
from torch import Tensor

from rbln_backend.graphs.operators import NAMES, operator_name, schema_of, target_of


@pytest.mark.parametrize(
    "name", sorted(f"{kind}.{name}" for kind, names in NAMES.items() for name in names)
)
def test_every_name_is_torchs_and_is_stored_under_one_name(name: str) -> None:
    op, target = target_of(name)
    assert callable(getattr(Tensor, str(target)) if op == "call_method" else target)
    assert schema_of(name) is None
    stored = operator_name(op, target)
    assert stored is not None
    # Some functionals are the C++ function behind them.
    assert target_of(stored) == (op, target)
