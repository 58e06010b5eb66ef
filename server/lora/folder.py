"""Reads and validates an adapter folder in PEFT's format as untrusted input.

Invariants: with a root, no file outside of it is opened, also not through links, and errors reveal
nothing about such files. Only regular files of bounded size are read. Of the weights only the
header is read, which has the type and shape of every tensor.

Refused before the engine reads it: PEFT features beyond plain LoRA, another base model, a rank
above the limit, unknown layers, and tensors of a wrong shape or type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from rbln_backend.api.names import Target, TensorName, check_config, check_modules, check_tensors
from rbln_backend.errors import AdapterError
from server.errors import InvalidAdapterError, describe, json_type
from server.host.files import read_regular
from server.wire import JsonObject

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_PATH_CHARS = 4096
_PARAM = "lora_path"
# Written by older versions of PEFT; reading them may run code.
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Contents of a folder: its resolved path, PEFT's configuration, the tensors by name.

    A tensor has a type, such as BF16, and a shape in elements.
    """

    path: Path
    config: JsonObject
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def read_folder(given: str, root: Path | None) -> AdapterFolder:
    """Read an adapter's folder, which must lie below `root`; relative paths start there.

    Without a root any folder is read; only operators can name one.

    Raises `InvalidAdapterError`.
    """
    top = None if root is None else root.resolve()
    if not given or len(given) > MAX_PATH_CHARS or "\0" in given:
        raise refusal(f"a path must have 1 to {MAX_PATH_CHARS} characters and no NUL")
    path = Path(given).expanduser() if top is None else top / given
    not_a_directory = refusal(f"{describe(given, 200)} is not a directory")
    try:
        folder = path.resolve()
        if top is not None and not folder.is_relative_to(top):
            raise refusal(f"{describe(given, 200)} does not lie below --lora-root")
        if not folder.is_dir():
            raise not_a_directory
    except (OSError, RuntimeError):
        # Too long for the file system, or links in a circle.
        raise not_a_directory from None
    config = _read_config(_regular_file(folder, CONFIG_FILE, top))
    return AdapterFolder(folder, config, _read_header(_regular_file(folder, WEIGHTS_FILE, top)))


def refusal(reason: str) -> InvalidAdapterError:
    """Return the error for a rejected adapter; `reason` is a clause."""
    return InvalidAdapterError(f"The adapter cannot be loaded: {reason}.", param=_PARAM)


def _regular_file(folder: Path, name: str, top: Path | None) -> Path:
    try:
        path = (folder / name).resolve()
    except (OSError, RuntimeError):
        raise refusal(f"{name} cannot be read") from None
    if top is not None and not path.is_relative_to(top):
        raise refusal(f"{name} is a link to a file that does not lie below --lora-root")
    # Reading a pipe would block, and a device has no end.
    if path.is_file():
        return path
    pickled = [other for other in _PICKLED if (folder / other).exists()]
    if name == WEIGHTS_FILE and pickled:
        raise refusal(f"it has {pickled[0]}, and only {WEIGHTS_FILE} is read")
    raise refusal(f"{name} is missing or not a regular file")


def _read_config(path: Path) -> JsonObject:
    try:
        content = read_regular(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise refusal(f"{CONFIG_FILE} cannot be read: {error.strerror or error}") from None
    try:
        config = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise refusal(f"{CONFIG_FILE} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise refusal(f"{CONFIG_FILE} must hold a JSON object, not {json_type(config)}")
    return config


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise refusal(
                f"the header of {WEIGHTS_FILE} has {header_bytes} bytes, and the limit is "
                f"{MAX_HEADER_BYTES}"
            )
        with safe_open(path, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (str(t.get_dtype()), tuple(t.get_shape())) for name, t in slices.items()}
    except OSError as error:
        raise refusal(f"{WEIGHTS_FILE} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise refusal(f"{WEIGHTS_FILE} is damaged: {error}") from None


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
    named = config.get("base_model_name_or_path")
    fits = any_base or named in (None, "") or ANY_BASE in base.names
    if not fits and not (isinstance(named, str) and short_name(named) in base.names):
        raise refusal(
            f"{CONFIG_FILE}: base_model_name_or_path is {describe(named)}, and the served model is "
            f"{' or '.join(map(repr, sorted(base.names)))}; --lora-base-names allows further names"
        )
    rank: int = config["r"]
    shapes = {name: shape for name, (_, shape) in folder.tensors.items()}
    _check(WEIGHTS_FILE, lambda: check_tensors(shapes, rank, base.targets, _parse))
    both = f"{CONFIG_FILE} and {WEIGHTS_FILE}"
    _check(both, lambda: check_modules(config, folder.tensors, base.targets, _parse))
    for name, (dtype, _) in folder.tensors.items():
        if dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise refusal(f"{WEIGHTS_FILE}: {name!r} has the type {dtype}, not one of {known}")
    return rank


def _check(file: str, check: Callable[[], None]) -> None:
    try:
        check()
    except AdapterError as error:
        reason = str(error)
        clipped = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
        raise refusal(f"{file}: {clipped}") from None


def _parse(name: str) -> TensorName | None:
    if (copy := _COPY.fullmatch(name)) is not None:
        return TensorName(copy["module"], copy["module"], None)
    if (found := _TENSOR.fullmatch(name)) is None:
        return None
    return TensorName(found["module"], layer_path(found["module"]), found["side"] == "A")
