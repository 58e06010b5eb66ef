"""A checkpoint that lacks any tensor is refused by name, from its headers and while it loads."""

from __future__ import annotations

import torch
from torch import nn

from rbln_backend.worker.weights import WrittenElements


class Joined(nn.Module):
    """Two parameters, one of which files hold in two parts, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 6, bias=False)
        self.own = nn.Linear(4, 2)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.both.weight


def test_elements_are_counted_once_and_by_storage() -> None:
    model = Joined()
    with WrittenElements(model) as written:
        for _ in range(2):
            model.both.weight.data[:3].copy_(torch.ones(3, 4))
        model.own.weight.data.copy_(torch.ones(2, 4))
        model.own.bias.data = torch.ones(2)
    assert written.missing() == ["both.weight"]
    with WrittenElements(model) as written:
        model.both.weight.data[:3].copy_(torch.ones(3, 4))
        model.both.weight.data.narrow(0, 3, 3).fill_(0)
    assert written.missing() == ["own.weight", "own.bias"]
