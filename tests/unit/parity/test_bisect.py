"""Which layer is said to depart."""

from __future__ import annotations

import numpy as np
import pytest

from rbln_backend.parity.jobs import Layers
from rbln_backend.parity.run import LayerDelta, first_departure, layer_deltas


def _layers(*pairs: tuple[float, float]) -> list[LayerDelta]:
    return [
        LayerDelta(name=f"layers.{index}", prefill=prefill, decode=decode)
        for index, (prefill, decode) in enumerate(pairs)
    ]


def test_rounding_that_grows_slowly_is_no_departure() -> None:
    layers = _layers((1e-6, 1e-6), (3e-6, 2e-6), (9e-5, 8e-5), (2e-4, 3e-4))
    assert first_departure(layers, "float32") is None


def test_the_first_jump_is_named_with_its_phase() -> None:
    found = first_departure(_layers((1e-6, 1e-6), (1e-6, 0.2), (0.3, 0.5)), "float32")
    assert found is not None
    assert (found.layer, found.phase) == ("layers.1", "decode")
    assert "layers.1 departs in decode" in str(found)


def test_the_first_layer_may_depart() -> None:
    found = first_departure(_layers((0.5, 0.1), (0.5, 0.5)), "bfloat16")
    assert found is not None
    assert (found.layer, found.phase) == ("layers.0", "prefill")


def test_a_state_that_is_not_finite_is_as_far_as_can_be() -> None:
    good = np.ones((1, 3, 4), dtype=np.float32)
    bad = good.copy()
    bad[0, 0, 0] = np.nan
    (delta,) = layer_deltas(
        Layers(names=("a",), states=good), Layers(names=("a",), states=bad), num_decoded=1
    )
    assert delta.prefill == float("inf")
    assert delta.decode == 0.0


def test_errors_are_relative_and_by_phase() -> None:
    ref = np.ones((1, 3, 4), dtype=np.float32) * 2
    other = ref.copy()
    other[0, 2] += 1
    (delta,) = layer_deltas(
        Layers(names=("x",), states=ref), Layers(names=("y",), states=other), num_decoded=1
    )
    assert (delta.name, delta.prefill, delta.decode) == ("y", 0.0, pytest.approx(0.5))


def test_sides_with_other_layers_are_refused() -> None:
    one = Layers(names=("a",), states=np.zeros((1, 3, 4), dtype=np.float32))
    two = Layers(names=("a", "b"), states=np.zeros((2, 3, 4), dtype=np.float32))
    with pytest.raises(ValueError, match="layers differ"):
        layer_deltas(one, two, num_decoded=1)
