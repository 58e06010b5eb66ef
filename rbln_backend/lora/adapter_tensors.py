"""Validation of the tensors of an adapter's file against the model's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rbln_backend.errors import AdapterError
from rbln_backend.lora.target import Target

_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class TensorName:
    """Parsed name of a tensor: its module, and the module's name among the targets.

    `is_a`: True for lora_A, False for lora_B, None for the copy of the LM head's weight that PEFT
    writes beside an adapter of it.
    """

    module: str
    target: str
    is_a: bool | None


def check_tensors(
    shapes: Mapping[str, Sequence[int]],
    rank: int,
    targets: Mapping[str, Target],
    parse: Callable[[str], TensorName | None],
) -> None:
    """Raise `AdapterError` naming the first tensor that does not fit.

    `shapes` are those of the file, in elements. `parse` returns None for other tensors.
    """
    if not shapes:
        raise AdapterError("it has no tensors")
    sides: dict[str, set[bool]] = {}
    for name, shape in shapes.items():
        parsed = parse(name)
        if parsed is None:
            raise AdapterError(
                f"{name[:_SHOWN_CHARS]!r} is neither a lora_A.weight nor a lora_B.weight of a "
                "linear layer"
            )
        target = targets.get(parsed.target)
        if target is None:
            raise AdapterError(_unknown_module(parsed.module[:_SHOWN_CHARS], targets))
        if parsed.is_a is None:
            wanted = target.weight_misfit(shape)
        else:
            wanted = target.misfit(shape, rank, is_a=parsed.is_a)
            sides.setdefault(parsed.module, set()).add(parsed.is_a)
        if wanted is not None:
            raise AdapterError(f"{name!r}: the shape must be {wanted}, got {list(shape)}")
    for module, present in sides.items():
        if len(present) == 1:
            missing = "B" if True in present else "A"
            raise AdapterError(f"module {module!r} has no lora_{missing}.weight")


def _unknown_module(module: str, targets: Mapping[str, Target]) -> str:
    kinds = sorted({path.rpartition(".")[2] for path in targets})
    if module.rpartition(".")[2] in kinds:
        return f"the served model has no module {module!r}"
    return (
        f"module {module!r} cannot be adapted in the served model, whose layers for adapters are "
        f"{', '.join(kinds) or 'none'}"
    )
