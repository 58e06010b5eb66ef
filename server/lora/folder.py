"""Reads an adapter folder in PEFT's format as untrusted input.

Invariants: with a root, no file outside of it is opened, also not through links, and errors reveal
nothing about such files. Only regular files of bounded size are read. Of the weights only the
header is read, which has the type and shape of every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from server.errors import InvalidAdapterError, describe, json_type
from server.host.files import read_regular
from server.wire.endpoint import JsonObject

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
class TensorInfo:
    """A tensor's type, such as BF16, and its shape in elements."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Contents of a folder: its resolved path, PEFT's configuration, the tensors by name."""

    path: Path
    config: JsonObject
    tensors: Mapping[str, TensorInfo]


def read_folder(given: str, root: Path | None) -> AdapterFolder:
    """Read an adapter's folder, which must lie below `root`; relative paths start there.

    Without a root any folder is read; only operators can name one.

    Raises `InvalidAdapterError`.
    """
    top = None if root is None else root.resolve()
    folder = _real(given, top)
    config = _read_config(_regular_file(folder, CONFIG_FILE, top))
    return AdapterFolder(folder, config, _read_header(_regular_file(folder, WEIGHTS_FILE, top)))


def refusal(reason: str) -> InvalidAdapterError:
    """Return the error for a rejected adapter; `reason` is a clause."""
    return InvalidAdapterError(f"The adapter cannot be loaded: {reason}.", param=_PARAM)


def _real(given: str, top: Path | None) -> Path:
    if not given or len(given) > MAX_PATH_CHARS or "\0" in given:
        raise refusal(f"a path must have 1 to {MAX_PATH_CHARS} characters and no NUL")
    path = Path(given).expanduser() if top is None else top / given
    not_a_directory = refusal(f"{describe(given, 200)} is not a directory")
    try:
        real = path.resolve()
        if top is not None and not real.is_relative_to(top):
            raise refusal(f"{describe(given, 200)} does not lie below --lora-root")
        if not real.is_dir():
            raise not_a_directory
    except (OSError, RuntimeError):
        # Too long for the file system, or links in a circle.
        raise not_a_directory from None
    return real


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


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise refusal(
                f"the header of {WEIGHTS_FILE} has {header_bytes} bytes, and the limit is "
                f"{MAX_HEADER_BYTES}"
            )
        with safe_open(path, framework="np") as tensors:
            return {name: _info(tensors.get_slice(name)) for name in tensors.keys()}  # noqa: SIM118
    except OSError as error:
        raise refusal(f"{WEIGHTS_FILE} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise refusal(f"{WEIGHTS_FILE} is damaged: {error}") from None


def _info(tensor: object) -> TensorInfo:
    return TensorInfo(str(tensor.get_dtype()), tuple(tensor.get_shape()))  # type: ignore[attr-defined]
