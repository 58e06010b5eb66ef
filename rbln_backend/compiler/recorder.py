"""From one run of a graph to what later runs repeat: kernel calls over the memory it used.

Shapes, addresses and views of a bound graph never change, so only what computes has to be done
again. The native library records its own calls (``emulator/kernels/bindings/replay.h``) and repeats
a series of them at once; any other operator is called again over the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rbln_backend.emulator.replay import Recording

Step = Callable[[], object]


class Recorder(TorchDispatchMode):
    """Records what runs inside its ``with`` block."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_repeatable = True
        """False once an operator read a value: then a run may depend on more than its calls."""
        self._recording = recording
        self._steps: list[Step | tuple[int, int]] = []
        self._writers: dict[int, tuple[int, int]] = {}
        """By address: the number of steps, and of native calls, up to the last that wrote there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import Dynamo, 0.7 s, to keep it out of `__torch_dispatch__`.
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        calls = self._recording.take_new()
        if calls is not None:
            self._add_calls(*calls)
        else:
            self._add_operator(func, args, kwargs, results)
        latest = self._steps[-1] if self._steps else None
        place = len(self._steps), latest[1] if isinstance(latest, tuple) else 0
        written = (results, args, kwargs) if func._schema.is_mutable else results
        self._writers |= {_address(tensor): place for tensor in _tensors(written)}
        return results

    @property
    def is_native(self) -> bool:
        """True if the steps are calls of the native library alone."""
        return all(isinstance(step, tuple) for step in self._steps)

    def steps(self) -> list[Step]:
        """Return the recorded steps of a run, in order."""
        return self._repeated(self._steps)

    def steps_to(self, output: Tensor) -> list[Step]:
        """Return the steps up to the last that writes to an output [...] of the run."""
        count, end = self._writers.get(_address(output), (0, 0))
        if not count:
            return self.steps()
        steps, last = self._steps[:count], self._steps[count - 1]
        if isinstance(last, tuple):
            steps[-1] = (last[0], end)
        return self._repeated(steps)

    def cache_steps(self) -> list[Step]:
        """Return the steps up to the last write of a KV cache; empty where that is not recorded.

        Nothing but the caches is computed.
        """
        last, replay = self._recording.last_cache_write, self._recording.replay
        steps: list[Step] = []
        if last is None:
            return steps
        for step in self._steps:
            if not isinstance(step, tuple):
                steps.append(step)
            elif step[0] <= last < step[1]:
                return [*steps, partial(replay, step[0], last + 1, only_writes=True)]
            else:
                steps.append(partial(replay, *step))
        return []

    def _repeated(self, steps: Sequence[Step | tuple[int, int]]) -> list[Step]:
        replay = self._recording.replay
        return [partial(replay, *step) if isinstance(step, tuple) else step for step in steps]

    def _add_calls(self, first: int, end: int) -> None:
        latest = self._steps[-1] if self._steps else None
        if isinstance(latest, tuple):
            first = latest[0]
            self._steps.pop()
        self._steps.append((first, end))

    def _add_operator(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> None:
        if torch.Tag.data_dependent_output in func.tags:
            self.is_repeatable = False
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        made = _tensors(results)
        # The others are views, which stay what they are.
        fresh = [_address(tensor) not in given for tensor in made]
        call = partial(func, *args, **kwargs)
        if any(fresh):
            names = None if func._schema.is_mutable or not all(fresh) else _out_names(func)
            if names is None:
                self._steps.append(partial(_refresh, call, made, fresh))
            else:
                overload, outs = names
                targets = dict(zip(outs, made, strict=True))
                self._steps.append(partial(overload, *args, **kwargs, **targets))
        elif func._schema.is_mutable:
            self._steps.append(call)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refresh(call: Callable[[], Any], made: Sequence[Tensor], fresh: Sequence[bool]) -> None:
    """Call again and put what comes out where the first results are."""
    for target, is_fresh, value in zip(made, fresh, _tensors(call()), strict=True):
        if is_fresh:
            target.copy_(value)


def _out_names(func: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """The overload that writes its results into given tensors, and what it calls those."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        arguments = overload._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(outs) == len(func._schema.returns) and rest == wanted:
            return overload, outs
    return None
