"""Outputs that the device keeps back until they are read (``SDK_DOUBLE_HOLD``).

A call of a runtime then returns before anything is computed. The outputs' memory holds garbage,
and the inputs are still to be read, until the caller waits: by ``Tensor.cpu`` of an output, or by
work of the device that comes after. Whoever reads the memory in another way reads garbage; whoever
fills the inputs of a run that has not ended changes what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rebel import log
from torch import Tensor

_waiting: list[Callable[[], None]] = []


def hold(run: Callable[[], None]) -> None:
    """Keep ``run`` back, after all that was kept before it has run."""
    catch_up()
    _waiting.append(run)


def catch_up() -> None:
    while _waiting:
        _waiting.pop(0)()


class HeldOutput(Tensor):
    """An output [...] whose memory is garbage until ``cpu`` is called."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def over(memory: Tensor) -> HeldOutput:
        """The output in ``memory`` [...]."""
        held: HeldOutput = Tensor._make_subclass(HeldOutput, memory)
        return held

    def cpu(self, *options: Any, **named: Any) -> Tensor:
        """Wait for the run, and return the output [...] in host memory."""
        if _waiting:
            log.write("waited")
            catch_up()
        return self.as_subclass(Tensor).cpu(*options, **named)
