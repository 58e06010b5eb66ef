"""One layer's experts as adapters see them, and the adapters' weights, expert by expert.

PEFT writes experts in two ways: every matrix of every expert as a linear layer of its own
(``experts.3.up_proj``), or those of all experts in one pair, for models whose experts are stacked
parameters. Of such a pair A is [experts * r, inputs], expert by expert, and B is
[outputs, r * experts], whose columns go through the experts for each of the r. ``experts`` and
``experts.base_layer`` name gate with up and down in either order (PEFT's ``ParamWrapper``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.utils import get_moe_expert_mapping

from rbln_backend.errors import AdapterError
from rbln_backend.lora.adapter_files import Shape, Target
from rbln_backend.lora.layers import RblnPunicaWrapper
from rbln_backend.lora.slots import SlotStack

Matrices = tuple[Tensor, Tensor] | None
"""A [r, inputs] and B [outputs, r]; None: the adapter leaves this alone."""
Matrix = tuple[int, str]
"""An expert's number and which of its matrices."""
# vLLM's names of an expert's matrices: gate, up and down.
_GATE, _UP, _DOWN = "w1", "w3", "w2"
# Modules that transformers renamed when it stacked their experts, and checkpoints did not.
_RENAMED = {"block_sparse_moe": "mlp"}


class Projections(NamedTuple):
    """Matrices of an adapter for one expert."""

    first: list[Matrices]
    """Gate and up, by slice."""
    second: Matrices


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a layer's experts on one rank, from which slots are made."""

    count: int
    hidden: int
    inner: int
    interleaved: bool
    """Gate and up alternate: one slice of twice the outputs in place of two."""

    @classmethod
    def of(cls, runner: MoERunner) -> ExpertSizes:
        layer: Any = runner.routed_experts
        return cls(
            count=layer.local_num_experts,
            hidden=layer.hidden_size,
            inner=layer.intermediate_size_per_partition,
            interleaved=layer.activation.value == "swigluoai",
        )

    @property
    def first(self) -> tuple[int, ...]:
        return (2 * self.inner,) if self.interleaved else (self.inner, self.inner)

    def elements(self, rank: int) -> int:
        """Elements of one slot, but for padding."""
        first = len(self.first) * self.hidden + 2 * self.inner
        return self.count * rank * (first + self.inner + self.hidden)


class ExpertLayer:
    """The experts of ``runner``, whose module is called ``name``."""

    def __init__(self, name: str, runner: MoERunner, names: Mapping[str, Matrix]) -> None:
        """``names``: of an expert's matrix, from the layer's parent on."""
        layer: Any = runner.routed_experts
        self.name = name
        self.sizes = ExpertSizes.of(runner)
        parallel = layer.moe_config.moe_parallel_config
        self._inner = self.sizes.inner * parallel.tp_size
        self._begin = self.sizes.inner * parallel.tp_rank
        self._total: int = layer.global_num_experts
        self._local: Sequence[int] = range(self._total)
        """The experts of this rank in their order here."""
        if layer.expert_map is not None:
            here = [(local, n) for n, local in enumerate(layer.expert_map.tolist()) if local >= 0]
            self._local = [number for _, number in sorted(here)]
        parent, _, last = name.rpartition(".")
        block, _, own = parent.rpartition(".")
        # Interleaved experts have never been linear layers of their own.
        known = {} if self.sizes.interleaved else names
        self._names = {f"{parent}.{suffix}": matrix for suffix, matrix in known.items()}
        modules = [name, f"{block}.{_RENAMED[own]}.{last}"] if own in _RENAMED else [name]
        self._stacks = [stack for module in modules for stack in (f"{module}.base_layer", module)]

    def targets(self) -> dict[str, Target]:
        """Return the module names that adapters may use, for the experts of all ranks."""
        first, second = Shape(self.sizes.hidden, self._inner), Shape(self._inner, self.sizes.hidden)
        found = {
            name: Target((second if matrix == _DOWN else first,))
            for name, (_, matrix) in self._names.items()
        }
        stacked = Target((self._stacked_first, second), self._total)
        return found | dict.fromkeys(self._stacks, stacked)

    def matrices(self, adapter: LoRAModel) -> list[Projections] | None:
        """Return an adapter's matrices for each expert of this rank; None if it has none.

        Raises ``AdapterError`` for a file that is ambiguous.
        """
        stacks = self._find_stacks(adapter)
        single = {
            matrix: weights
            for name, matrix in self._names.items()
            if (weights := adapter.get_lora(name)) is not None
        }
        if stacks and single:
            raise AdapterError(f"{self.name} has its experts one by one and stacked as well")
        if stacks:
            return [self._of_stacks(stacks, number) for number in self._local]
        if single:
            return [self._of_single(single, number) for number in self._local]
        return None

    @property
    def _stacked_first(self) -> Shape:
        return Shape(self.sizes.hidden, 2 * self._inner)

    def _find_stacks(self, adapter: LoRAModel) -> dict[Shape, LoRALayerWeights]:
        """By what they change, which nothing but their shapes tells."""
        found: dict[Shape, LoRALayerWeights] = {}
        for name in self._stacks:
            weights = adapter.get_lora(name)
            if weights is None:
                continue
            shape = Shape(weights.lora_a.shape[1], weights.lora_b.shape[0])
            if shape in found or shape not in self.targets()[name].shapes:
                raise AdapterError(f"{name} changes neither gate with up nor down alone")
            found[shape] = weights
        return found

    def _of_single(self, single: Mapping[Matrix, LoRALayerWeights], number: int) -> Projections:
        first = [_pair(single.get((number, matrix))) for matrix in (_GATE, _UP)]
        return Projections(
            [self._outputs(pair) for pair in first],
            self._inputs(_pair(single.get((number, _DOWN)))),
        )

    def _of_stacks(self, stacks: Mapping[Shape, LoRALayerWeights], number: int) -> Projections:
        both = self._one_of(stacks.get(self._stacked_first), number)
        down = self._one_of(stacks.get(Shape(self._inner, self.sizes.hidden)), number)
        if self.sizes.interleaved:
            return Projections([self._outputs(both, times=2)], self._inputs(down))
        halves = [None, None] if both is None else [(both[0], b) for b in both[1].chunk(2)]
        return Projections([self._outputs(half) for half in halves], self._inputs(down))

    def _one_of(self, stack: LoRALayerWeights | None, number: int) -> Matrices:
        if stack is None:
            return None
        a = stack.lora_a.unflatten(0, (self._total, -1))
        b = stack.lora_b.unflatten(1, (-1, self._total))
        return a[number], b[:, :, number]

    def _outputs(self, pair: Matrices, *, times: int = 1) -> Matrices:
        """This rank's part of a matrix whose outputs are split."""
        if pair is None:
            return None
        return pair[0], pair[1].narrow(0, times * self._begin, times * self.sizes.inner)

    def _inputs(self, pair: Matrices) -> Matrices:
        """This rank's part of a matrix whose inputs are split."""
        return None if pair is None else (pair[0].narrow(1, self._begin, self.sizes.inner), pair[1])


def adaptable_experts(model: nn.Module) -> list[tuple[str, MoERunner]]:
    """The layers of experts that adapters may change, by name.

    Data-parallel engines compute each other's rows, and each knows its own adapters alone.
    """
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, MoERunner) and module.moe_config.dp_size == 1
    ]


def expert_names(model: nn.Module) -> dict[str, Matrix]:
    """Return an expert's matrix by each of its checkpoint names, from the layer's parent on."""
    mapping = get_moe_expert_mapping(model)
    return {name.rstrip("."): (number, matrix) for _, name, number, matrix in mapping}


def _pair(weights: LoRALayerWeights | None) -> Matrices:
    return None if weights is None else (weights.lora_a, weights.lora_b)


class _Stacks(NamedTuple):
    """One projection: for each of E experts what ``SlotStack`` has, in tensors of [E, S, ...]."""

    a: Tensor
    b: tuple[Tensor, ...]
    like: SlotStack
    """The first expert's, as a view."""

    @classmethod
    def allocate(cls, experts: int, one: SlotStack) -> _Stacks:
        """Empty ones of the sizes of ``one``."""
        a = one.a.new_zeros(experts, *one.a.shape)
        b = tuple(stack.new_zeros(experts, *stack.shape) for stack in one.b)
        like = SlotStack(a[0], tuple(s[0] for s in b), one.rank, one.inputs, one.outputs)
        return cls(a, b, like)

    def image(self, experts: Sequence[Sequence[Matrices]]) -> list[Tensor]:
        """Per expert its slices, packed: [E, ...] for ``a`` and each of ``b``."""
        made = []
        for slices in experts:
            lower = [None if pair is None else pair[0] for pair in slices]
            upper = [None if pair is None else pair[1] for pair in slices]
            image = self.like.image(lower, upper)
            made.append((image.a, *image.b))
        return [torch.stack(parts) for parts in zip(*made, strict=True)]

    def write(self, slot: int, image: Sequence[Tensor] | None) -> None:
        """Put ``image``, or nothing, into ``slot`` of every expert."""
        stacks = (self.a, *self.b)
        for stack, part in zip(stacks, image or (None,) * len(stacks), strict=True):
            if part is None:
                stack[:, slot].zero_()
            else:
                stack[:, slot].copy_(part)

    def add(self, y: Tensor, x: Tensor, rows: Tensor, number: int) -> None:
        """Add one expert's adapters to y [T, outputs], of x [T, inputs]; see ``SlotStack.add``."""
        replace(self.like, a=self.a[number], b=tuple(s[number] for s in self.b)).add(y, x, rows)


class _Image(NamedTuple):
    """One adapter's tensors [E, ...] of both projections."""

    first: list[Tensor]
    second: list[Tensor]


class AdaptedExperts:
    """The experts of one layer, which compute with this; see ``Adapted`` and ``layers.experts``."""

    def __init__(
        self, layer: ExpertLayer, source: RblnPunicaWrapper, allocate: Callable[..., SlotStack]
    ) -> None:
        """``source`` and ``allocate`` are those of ``AdaptedLinear``."""
        self._layer, self._source = layer, source
        sizes = layer.sizes
        self._first, self._second = (
            _Stacks.allocate(sizes.count, allocate(inputs=inputs, outputs=outputs))
            for inputs, outputs in ((sizes.hidden, sizes.first), (sizes.inner, (sizes.hidden,)))
        )

    def tensors(self) -> Mapping[str, Tensor]:
        first = {f"b13.{index}": stack for index, stack in enumerate(self._first.b)}
        return {"a13": self._first.a, **first, "a2": self._second.a, "b2": self._second.b[0]}

    def image(self, adapter: LoRAModel) -> _Image | None:
        experts = self._layer.matrices(adapter)
        if experts is None:
            return None
        first = self._first.image([each.first for each in experts])
        return _Image(first, self._second.image([[each.second] for each in experts]))

    def write(self, slot: int, image: _Image | None) -> None:
        self._first.write(slot, None if image is None else image.first)
        self._second.write(slot, None if image is None else image.second)

    def arguments(self) -> tuple[Any, ...]:
        """Return the adapters' arguments of the ops for experts."""
        b1, b3 = (*self._first.b, None)[:2]
        parts = (self._first.a, b1, b3, self._second.a, self._second.b[0])
        return (self._source.rows, *parts, self._first.like.rank)

    def add_first(self, gate_up: Tensor, x: Tensor, number: int) -> None:
        """Add the adapters' part to the first projection of an expert; x is [rows, hidden]."""
        self._first.add(gate_up, x, self._source.rows, number)

    def add_second(self, out: Tensor, inner: Tensor, number: int) -> None:
        """Add the adapters' part to the second projection; ``inner`` is [rows, inner]."""
        self._second.add(out, inner, self._source.rows, number)
