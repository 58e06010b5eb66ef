"""An adapter's files: checks of configuration, names and shapes of tensors, and digests.

vLLM reads rank, alpha and rsLoRA of the configuration and ignores the rest. An adapter that depends
on other fields would therefore be applied wrongly without an error. By the digest of a loaded
adapter its prefixes are found after a restart, when its number and name may mean other weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import regex
from blake3 import blake3

from rbln_backend.errors import AdapterError


class Shape(NamedTuple):
    """A matrix over all ranks, in elements."""

    inputs: int
    outputs: int


class Pair(NamedTuple):
    """The shapes of a lora_A and its lora_B."""

    a: tuple[int, ...]
    b: tuple[int, ...]


class Target(NamedTuple):
    """A linear layer, or (``experts``) one matrix of every expert of a layer in a single pair.

    PEFT names a stack of experts' matrices by the module that holds several of them
    (``target_parameters``); the shapes in the file identify the matrix.
    """

    shapes: tuple[Shape, ...]
    experts: int = 1

    @classmethod
    def linear(cls, inputs: int, outputs: int) -> Target:
        return cls((Shape(inputs, outputs),))

    @classmethod
    def from_lists(cls, shapes: Iterable[Iterable[int]], experts: int) -> Target:
        """Return a target from shapes as lists, as they come from JSON."""
        return cls(tuple(Shape(*shape) for shape in shapes), experts)

    def pairs(self, rank: int) -> list[Pair]:
        """Return the shapes that a file at ``rank`` must have, in the order of ``shapes``."""
        total = rank * self.experts
        return [Pair((total, shape.inputs), (shape.outputs, total)) for shape in self.shapes]

    def misfit(self, shape: Iterable[int], rank: int, *, is_a: bool) -> str | None:
        """Return the accepted shapes as text, or None if ``shape`` is one of them."""
        wanted = [pair.a if is_a else pair.b for pair in self.pairs(rank)]
        if tuple(shape) in wanted:
            return None
        return " or ".join(str(list(each)) for each in dict.fromkeys(wanted))

    def weight_misfit(self, shape: Iterable[int]) -> str | None:
        """Return the shape of the layer's only weight as text, or None if ``shape`` is that."""
        (weight,) = self.shapes
        wanted = [weight.outputs, weight.inputs]
        return None if list(shape) == wanted else str(wanted)


_REFUSED: Mapping[str, str] = {
    "use_dora": "magnitudes (DoRA) have no place in the slots",
    "modules_to_save": "whole modules are not replaced",
    "rank_pattern": "all modules of an adapter have one rank",
    "alpha_pattern": "all modules of an adapter have one scale",
    "lora_bias": "adapters have no biases",
    "fan_in_fan_out": "matrices are [outputs, inputs]",
    "trainable_token_indices": "embeddings are not adapted",
    "layer_replication": "the layers are those of the base model",
    "use_qalora": "inputs are not pooled",
    "alora_invocation_tokens": "an adapter applies from the first token on",
    "arrow_config": "adapters are not routed",
    "megatron_config": "only plain PEFT adapters are read",
}
# Their base weights are what the initialisation left of the published ones.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
_SHOWN_CHARS = 200
_PATTERNS_S = 2.0
"""Most time to compare an adapter's patterns with all names of modules."""


class _Selection:
    """PEFT's choice of modules by an adapter's configuration; raises `AdapterError`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        for field in ("target_modules", "exclude_modules", "layers_pattern"):
            value = config.get(field)
            if not isinstance(value, str | list | None) or not all(
                isinstance(name, str) for name in value or ()
            ):
                raise AdapterError(f"{field} is {value!r}, not a text or a list of texts")
        layers = config.get("layers_to_transform")
        layers = layers if isinstance(layers, list) else [] if layers is None else [layers]
        if not all(type(layer) is int for layer in layers):
            raise AdapterError(f"layers_to_transform is {layers!r}, not a list of integers")
        self._layers = frozenset(layers)
        self._names: dict[str, Any] = {
            field: frozenset(value) if isinstance(value := config.get(field), list) else value
            for field in ("target_modules", "exclude_modules")
        }
        patterns = config.get("layers_pattern") or r"[^.]*"
        self._patterns = [patterns] if isinstance(patterns, str) else patterns
        # A client may have written the patterns.
        self._deadline = time.monotonic() + _PATTERNS_S

    def has(self, path: str) -> bool:
        """Return True if PEFT adapts the module at `path` of the base model."""
        if self._is_named("exclude_modules", path) or not self._is_named("target_modules", path):
            return False
        if isinstance(self._names["target_modules"], str) or not self._layers:
            return True
        for pattern in self._patterns:
            numbered = rf"(?:.*\.)?(?:{pattern})\.(\d+)\..*"
            if found := self._match(numbered, "layers_pattern", path):
                return int(found[found.re.groups]) in self._layers
        return False

    def _is_named(self, field: str, path: str) -> bool:
        names = self._names[field]
        if isinstance(names, str):
            return self._match(names, field, path) is not None
        parts = path.split(".")
        return bool(names) and any(".".join(parts[n:]) in names for n in range(len(parts)))

    def _match(self, pattern: str, field: str, path: str) -> Any:
        try:
            left = max(self._deadline - time.monotonic(), 0.001)
            return regex.fullmatch(pattern, path, timeout=left)
        except regex.error as error:
            raise AdapterError(f"{field} is not a regular expression: {error}") from None
        except TimeoutError:
            raise AdapterError(f"{field} takes more than {_PATTERNS_S:g} s to compare") from None


@dataclass(frozen=True, slots=True)
class TensorName:
    """Parsed name of a tensor: its module, and the module's name among the targets.

    `is_a`: True for lora_A, False for lora_B, None for the copy of the LM head's weight that PEFT
    writes beside an adapter of it.
    """

    module: str
    target: str
    is_a: bool | None


def check_config(config: object, max_rank: int) -> None:
    """Raise ``AdapterError`` naming the first field that cannot be served, its value and why."""
    if not isinstance(config, dict):
        raise AdapterError("adapter_config.json holds no object")
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"peft_type is {config['peft_type']!r}; only 'LORA' is read")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"r is {rank!r}, not a positive integer")
    if rank > max_rank:
        raise AdapterError(f"r is {rank}, and --max-lora-rank is {max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise AdapterError(f"lora_alpha is {alpha!r}, not a number")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias is {config['bias']!r}: adapters have no biases")
    for field, reason in _REFUSED.items():
        if config.get(field):
            raise AdapterError(f"{field} is {config[field]!r}: {reason}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise AdapterError(
            f"init_lora_weights is {start!r}: it changes the base weights; save it as a plain "
            "adapter (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )


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
            module = parsed.module[:_SHOWN_CHARS]
            kinds = sorted({path.rpartition(".")[2] for path in targets})
            if module.rpartition(".")[2] in kinds:
                raise AdapterError(f"the served model has no module {module!r}")
            raise AdapterError(
                f"module {module!r} cannot be adapted in the served model, whose layers for "
                f"adapters are {', '.join(kinds) or 'none'}"
            )
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


def check_modules(
    config: Mapping[str, Any],
    names: Iterable[str],
    targets: Mapping[str, Target],
    parse: Callable[[str], TensorName | None],
) -> None:
    """Raise `AdapterError` if the file and ``target_modules`` disagree about an adapted module.

    PEFT would leave out a matrix that the configuration does not name, and would adapt nothing
    where the file lacks one. `names` are the tensors that `check_tensors` has passed. Stacks of
    experts are not modules, and not compared.
    """
    found: dict[str, str] = {}
    for name in names:
        parsed = parse(name)
        if parsed and parsed.is_a is not None and targets[parsed.target].experts == 1:
            path = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
            found[parsed.target] = path
    chosen = config.get("target_modules")
    kinds = {_kind(target) for target in found}
    named = isinstance(chosen, str | list) and chosen != "all-linear"
    whole = not named and config.get("layers_to_transform") in (None, [])
    selection = _Selection(config)
    if named:
        for path in found.values():
            if not selection.has(path):
                raise AdapterError(
                    f"it has matrices for {path[:_SHOWN_CHARS]!r}, which adapter_config.json does "
                    "not name (target_modules, exclude_modules, layers_to_transform)"
                )
    # The served model's names may begin differently.
    prefixes = dict(_prefixes(target, path) for target, path in found.items())
    for target, shape in targets.items():
        # An adapter may leave out experts: those that no token of its training reached.
        if target in found or shape.experts > 1 or ".experts." in target:
            continue
        prefix = next((known for known in prefixes if target.startswith(known)), None)
        if prefix is None:
            continue
        path = prefixes[prefix] + target[len(prefix) :]
        # Without a list, each kind of module is in every layer or in none.
        if (named and selection.has(path)) or (whole and _kind(target) in kinds):
            raise AdapterError(
                f"it lacks matrices for {path!r}, which adapter_config.json names, or which other "
                "layers have"
            )


def _kind(module: str) -> str:
    return ".".join(part for part in module.split(".") if not part.isdecimal())


def _prefixes(target: str, path: str) -> tuple[str, str]:
    """Return what two names of one module begin with, before the parts that they share."""
    parts = zip(reversed(target.split(".")), reversed(path.split(".")), strict=False)
    length = len(".".join(mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1], parts)))
    return target[: len(target) - length], path[: len(path) - length]


_ENGINES: dict[str, dict[int, str]] = {}


def adapter_digests(instance_id: str) -> dict[int, str]:
    """Return the digests by number of an engine, which its worker and its scheduler share.

    ``instance_id`` is vLLM's of the configuration. Empty in a scheduler whose worker is another
    process.
    """
    return _ENGINES.setdefault(instance_id, {})


@dataclass(frozen=True)
class AdapterHasher:
    """Hashes of the prefixes of one adapter's request."""

    hash: Callable[[Any], Any]
    digest: str | None
    """In the hashes; None: they have the adapter's number instead."""

    def __call__(self, request: Any) -> Any:
        return self.hash(request)


class DigestedFiles:
    """The files of an adapter, hashed while they are read for its weights."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._before = self._states()

    def digest(self) -> str:
        """Return the digest of names and contents; ``AdapterError`` if files have changed since."""
        whole = blake3()
        for file in self._files:
            own = blake3()
            own.update_mmap(file)
            whole.update(f"{file.name}\0".encode() + own.digest())
        if self._states() != self._before:
            raise AdapterError("its files changed while they were read")
        return whole.hexdigest()

    def _states(self) -> list[tuple[int, int, int]]:
        states = [file.stat() for file in self._files]
        return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in states]
