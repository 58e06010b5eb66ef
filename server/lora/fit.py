"""Validation of an adapter against the served model, before the engine reads it.

Rejects PEFT features beyond plain LoRA, another base model, a rank above the limit, unknown layers,
and tensors of a wrong shape or type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from rbln_backend.api.requests import TensorName, check_config, check_modules, check_tensors
from rbln_backend.errors import AdapterError
from server.errors import describe
from server.lora.folder import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, refusal
from server.lora.port import Target
from server.wire.endpoint import JsonObject

ANY_BASE = "*"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_COPY = re.compile(r"(?:base_model\.model\.)?(?P<module>.*\blm_head)\.base_layer\.weight")
"""Copy of the served model's LM head, which PEFT writes beside an adapter of it."""
_LAYER = re.compile(r"(?:^|\.)(?P<layer>\w+\.\d+\..+)")
_DTYPES = ("F32", "BF16", "F16")
_MAX_REASON = 300
_MAX_ALPHA = 1e6
"""Far above trained values. A larger one, such as infinity, would corrupt every token."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Names, adaptable layers and largest rank of the served model.

    Names are `short_name`s, the keys of `targets` are `layer_path`s.
    """

    names: frozenset[str]
    targets: Mapping[str, Target]
    max_rank: int

    @classmethod
    def of(cls, names: Iterable[str], targets: Mapping[str, Target], max_rank: int) -> ServedModel:
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
    """Return a module's path from its numbered layer on; the prefix depends on the model's wrapper.

    The engine compares the whole path when it reads the adapter.
    """
    found = _LAYER.search(module)
    return module if found is None else module[found.start("layer") :]


def check_fit(folder: AdapterFolder, base: ServedModel, *, any_base: bool = False) -> int:
    """Return the adapter's rank. Raises `InvalidAdapterError` naming file, field and limit.

    With `any_base` the adapter may name any base model, because the operator has named it.
    """
    config = folder.config
    _check(CONFIG_FILE, lambda: check_config(config, base.max_rank))
    if not 0 < abs(config["lora_alpha"]) <= _MAX_ALPHA:
        alpha = describe(config["lora_alpha"])
        raise refusal(f"{CONFIG_FILE}: lora_alpha is {alpha}, and at most {_MAX_ALPHA:g} is taken")
    if not any_base:
        _check_base(config, base.names)
    rank: int = config["r"]
    shapes = {name: info.shape for name, info in folder.tensors.items()}
    _check(WEIGHTS_FILE, lambda: check_tensors(shapes, rank, base.targets, _parse))
    both = f"{CONFIG_FILE} and {WEIGHTS_FILE}"
    _check(both, lambda: check_modules(config, folder.tensors, base.targets, _parse))
    for name, info in folder.tensors.items():
        if info.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise refusal(f"{WEIGHTS_FILE}: {name!r} has the type {info.dtype}, not one of {known}")
    return rank


def _check(file: str, check: Callable[[], None]) -> None:
    try:
        check()
    except AdapterError as error:
        reason = str(error)
        clipped = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
        raise refusal(f"{file}: {clipped}") from None


def _check_base(config: JsonObject, names: frozenset[str]) -> None:
    named = config.get("base_model_name_or_path")
    if named is None or named == "" or ANY_BASE in names:
        return
    if not isinstance(named, str) or short_name(named) not in names:
        raise refusal(
            f"{CONFIG_FILE}: base_model_name_or_path is {describe(named)}, and the served model is "
            f"{' or '.join(map(repr, sorted(names)))}; --lora-base-names allows further names"
        )


def _parse(name: str) -> TensorName | None:
    if (copy := _COPY.fullmatch(name)) is not None:
        return TensorName(copy["module"], copy["module"], None)
    if (found := _TENSOR.fullmatch(name)) is None:
        return None
    return TensorName(found["module"], layer_path(found["module"]), found["side"] == "A")
