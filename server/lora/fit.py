"""Validation of an adapter against the served model, before the engine reads it.

Rejects PEFT features beyond plain LoRA, another base model, a rank above the limit, unknown layers,
and tensors of a wrong shape or type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from rbln_backend.errors import AdapterError
from rbln_backend.lora.adapter_config import check_config
from server.errors import describe
from server.lora.folder import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, TensorInfo, refusal
from server.lora.port import Target
from server.wire.endpoint import JsonObject

ANY_BASE = "*"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# PEFT writes the served model's own LM head beside an adapter of it.
_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.*\blm_head)\.base_layer\.weight")
_LAYER = re.compile(r"(?:^|\.)(?P<layer>\w+\.\d+\..+)")
_DTYPES = ("F32", "BF16", "F16")
_MAX_REASON = 300
# Far above trained values. A larger one, such as infinity, would corrupt every token.
_MAX_ALPHA = 1e6


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Constraints that the served model sets: its names, adaptable layers and largest rank.

    Names are `short_name`s, layers go by their `layer_path`.
    """

    names: frozenset[str]
    targets: Mapping[str, Target]
    max_rank: int

    @classmethod
    def of(cls, names: Iterable[str], targets: Mapping[str, Target], max_rank: int) -> BaseModel:
        """Return the constraints for model names and the engine's module paths."""
        layers = {layer_path(module): shape for module, shape in targets.items()}
        return cls(frozenset(map(short_name, names)), layers, max_rank)


def short_name(name: str) -> str:
    """Return the last part of a path or of a name on the hub, in lower case.

    Adapters name the model they were trained over by the path it had there.
    """
    parts = PurePath(name.strip()).parts
    cached = [part for part in parts if part.startswith("models--")]
    if cached and "snapshots" in parts:
        # The hub's cache: models--<owner>--<name>/snapshots/<commit>.
        return cached[-1].rpartition("--")[2].casefold()
    return parts[-1].casefold() if parts else ""


def layer_path(module: str) -> str:
    """Return a module's path from its numbered layer on: what is before depends on who wraps it.

    The engine compares the whole path once more when it reads the adapter.
    """
    found = _LAYER.search(module)
    return module if found is None else module[found.start("layer") :]


def check_fit(folder: AdapterFolder, base: BaseModel, *, any_base: bool = False) -> int:
    """Return the adapter's rank. Raises `InvalidAdapterError` naming file, field and limit.

    With `any_base` the adapter may name any base model, because the operator has named it.
    """
    _check_config(folder.config, base.max_rank)
    if not any_base:
        _check_base(folder.config, base.names)
    rank: int = folder.config["r"]
    _check_tensors(folder.tensors, rank, base.targets)
    return rank


def _check_config(config: JsonObject, max_rank: int) -> None:
    try:
        check_config(config, max_rank)
    except AdapterError as error:
        reason = str(error)
        clipped = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
        raise refusal(f"{CONFIG_FILE}: {clipped}") from None
    if not 0 < abs(config["lora_alpha"]) <= _MAX_ALPHA:
        alpha = describe(config["lora_alpha"])
        raise refusal(f"{CONFIG_FILE}: lora_alpha is {alpha}, and at most {_MAX_ALPHA:g} is taken")


def _check_base(config: JsonObject, names: frozenset[str]) -> None:
    named = config.get("base_model_name_or_path")
    if named is None or named == "" or ANY_BASE in names:
        return
    if not isinstance(named, str) or short_name(named) not in names:
        raise refusal(
            f"{CONFIG_FILE}: base_model_name_or_path is {describe(named)}, and the served model is "
            f"{' or '.join(map(repr, sorted(names)))}; --lora-base-names allows further names"
        )


def _check_tensors(
    tensors: Mapping[str, TensorInfo], rank: int, targets: Mapping[str, Target]
) -> None:
    if not tensors:
        raise refusal(f"{WEIGHTS_FILE} has no tensors")
    sides: dict[str, set[str]] = {}
    for name, info in tensors.items():
        copy = _COPY.fullmatch(name)
        if copy is not None and copy["module"] in targets:
            _check_copy(name, info, targets[copy["module"]])
            continue
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise refusal(
                f"{WEIGHTS_FILE}: {describe(name, 200)} is neither a lora_A.weight nor a "
                "lora_B.weight of a linear layer"
            )
        module, side = found["module"], found["side"]
        layer = targets.get(layer_path(module))
        if layer is None:
            raise refusal(f"{WEIGHTS_FILE}: {_unknown_module(module, targets)}")
        _check_tensor(name, info, layer.misfit(info.shape, rank, is_a=side == "A"))
        sides.setdefault(module, set()).add(side)
    for module, present in sides.items():
        if len(present) == 1:
            missing = "B" if "A" in present else "A"
            raise refusal(f"{WEIGHTS_FILE}: module {module!r} has no lora_{missing}.weight")


def _check_copy(name: str, info: TensorInfo, head: Target) -> None:
    (shape,) = head.shapes
    fits = info.shape == (shape.outputs, shape.inputs)
    _check_tensor(name, info, None if fits else str([shape.outputs, shape.inputs]))


def _check_tensor(name: str, info: TensorInfo, wanted: str | None) -> None:
    """`wanted`: the shapes that it should have, in words, if it has none of them."""
    if info.dtype not in _DTYPES:
        raise refusal(
            f"{WEIGHTS_FILE}: {name!r} has the type {info.dtype}, which is not one of "
            f"{', '.join(_DTYPES)}"
        )
    if wanted is not None:
        raise refusal(
            f"{WEIGHTS_FILE}: {name!r} has the shape {list(info.shape)}, and r and the served "
            f"model's layer ask for {wanted}"
        )


def _unknown_module(module: str, targets: Mapping[str, Target]) -> str:
    kinds = sorted({path.rpartition(".")[2] for path in targets})
    known = ", ".join(kinds) or "none"
    kind = module.rpartition(".")[2]
    where = f"module {describe(module, 200)}"
    if kind in kinds:
        return f"the served model has no {where}"
    return f"{where} cannot be adapted in the served model, whose layers for adapters are {known}"
