"""Parameters and tokens of requests whose rows the device has in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rbln_backend.core import GraphSpec, Phase, StepOutputs
from rbln_backend.worker.device_sampler import DeviceSampler
from rbln_backend.worker.graph_factory import GraphListener, GraphRequest
from rbln_backend.worker.inputs import DecodeRows, LongestFirst

ROWS, VOCAB = 4, 64


class EagerGraph:
    """A function that runs on its inputs, without a compiler."""

    def __init__(
        self, request: GraphRequest, function: Callable[..., Any], names: Sequence[str]
    ) -> None:
        self.spec = request.spec
        self._inputs: Mapping[str, Tensor] = request.inputs
        self._function, self._names = function, names

    def run(self, useful: object = None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self._function(*(self._inputs[n] for n in self._names))
        return outputs

    def run_over(self, name: str, tensor: Tensor) -> tuple[Tensor, ...]:
        self._inputs = {**self._inputs, name: tensor}
        return self.run()

    def prepare(self) -> None:
        """Nothing is to be done."""


@pytest.fixture
def sampler(sdk: ModuleType) -> DeviceSampler:
    assert sdk
    spec = GraphSpec.of(Phase.DECODE, ROWS)
    model = EagerGraph(
        GraphRequest(spec, {"x": torch.zeros(ROWS, VOCAB)}, None), lambda x: (x,), ["x"]
    )
    made = DeviceSampler("0.12.0")
    factory: Any = SimpleNamespace(build_other=EagerGraph)
    made.compile([model], factory, GraphListener())
    return made


def metadata_of(**fields: Any) -> Any:
    nothing = {"generators": {}, "logitsprocs": SimpleNamespace(argmax_invariant=[])}
    return SimpleNamespace(**(nothing | {"top_k": None, "top_p": None} | fields))


def test_each_request_has_its_own_parameters(sampler: DeviceSampler) -> None:
    """The longest request is the second; the bucket's last row is padding."""
    order = LongestFirst()
    places = np.array([5, 9, 7])
    order.arrange(DecodeRows(np.zeros(3, dtype=np.int64), places, []), ROWS)
    # In each row of the graph two tokens are likely, one of them a little more.
    logits = torch.full((ROWS, VOCAB), -20.0)
    for row in range(ROWS):
        logits[row, 10 * row], logits[row, 10 * row + 1] = 1.0, 0.9
    metadata = metadata_of(
        temperature=torch.tensor([0.0, 1.0, 1.0]),
        top_k=torch.tensor([VOCAB, 2, VOCAB], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 0.1]),
    )
    outputs = StepOutputs([logits], order.restore)
    drawn = [sampler.draw(outputs, 3, metadata) for _ in range(60)]
    greedy, open_one, filtered = ({tokens[row][0] for tokens in drawn} for row in range(3))
    assert (greedy, open_one, filtered) == ({20}, {0, 1}, {10})


def test_a_low_temperature_leaves_the_likeliest(sampler: DeviceSampler) -> None:
    logits = torch.zeros(ROWS, VOCAB)
    logits[:, 7] = 0.5
    metadata = metadata_of(temperature=torch.tensor([0.01] * 3 + [100.0]))
    drawn = [sampler.draw(StepOutputs([logits]), 4, metadata) for _ in range(40)]
    assert {tokens[row][0] for tokens in drawn for row in range(3)} == {7}
    assert len({tokens[3][0] for tokens in drawn}) > 10


def test_seeds_are_the_hosts(sampler: DeviceSampler) -> None:
    assert sampler.takes(metadata_of())
    assert not sampler.takes(metadata_of(generators={0: torch.Generator()}))
