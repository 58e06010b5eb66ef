"""A Python of the vendor's: our environment's packages without ours, and their wheels.

Ours must not be in it: both plug-ins are called ``rbln``, and vLLM keeps the last one found.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tests.foreign_python import install, kept_python, run
from tests.sdk_double.launch import double_environment

WHEELS = ("vllm-rbln==0.12.0", "torch-rbln==0.12.0", "numba==0.68.1", "llvmlite==0.50.0")
CACHE = Path.home() / ".cache" / "rbln-serve" / "vendor"

# Their native library was built against an ABI that only a real librbln.so can promise.
_NATIVE = {"TORCH_RBLN_SKIP_ABI_CHECK": "1"}
_HERE = Path(__file__).parent
_OURS = ("rbln_serve", "__editable__")


def vendor_python() -> Path:
    """The interpreter, its environment made at the first use; needs the package registry then."""
    site = Path(sysconfig.get_paths()["purelib"])
    key = hashlib.sha256("\n".join((*WHEELS, *sorted(_shared(site)))).encode()).hexdigest()[:12]
    return kept_python(CACHE / key, lambda place: _fill(place, site))


def _shared(site: Path) -> Iterable[str]:
    names = (entry.name for entry in site.iterdir())
    return (name for name in names if not name.startswith(_OURS) and not name.endswith(".pth"))


def _fill(place: Path, site: Path) -> None:
    # Wheels go in first: links to packages of ours must not be written through.
    install(place, *WHEELS)
    theirs = next((place / "lib").glob("python*")) / "site-packages"
    for name in _shared(site):
        if not (theirs / name).exists():
            # A worktree, through which the packages are found here, may be gone tomorrow.
            (theirs / name).symlink_to((site / name).resolve())


def native_library() -> Path:
    """The folder of ``librbln.so``, built when its source has changed."""
    source = _HERE / "librbln.cpp"
    place = CACHE / f"librbln-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not (place / "librbln.so").exists():
        place.mkdir(parents=True, exist_ok=True)
        made = place / f"librbln.{os.getpid()}"
        run(
            [
                *"g++ -std=c++17 -O1 -shared -fPIC -Wall".split(),
                "-Wl,-soname,librbln.so",
                "-o",
                str(made),
                str(source),
            ]
        )
        made.rename(place / "librbln.so")
    return place


def vendor_environment(
    log: Path, *, device_tensors: bool, cache: Path, **settings: str | int | float | Iterable[str]
) -> dict[str, str]:
    """Variables of a run of theirs over the double, ``settings`` being ``SDK_DOUBLE_*``."""
    environment = double_environment(log, **settings)
    # Our tree is second on the path of ``double_environment``; theirs has the double alone.
    environment["PYTHONPATH"] = environment["PYTHONPATH"].split(os.pathsep)[0]
    return environment | {
        **_NATIVE,
        "LD_LIBRARY_PATH": str(native_library()),
        "VLLM_RBLN_USE_VLLM_MODEL": "1",
        "VLLM_RBLN_USE_DEVICE_TENSOR": "1" if device_tensors else "0",
        # The double's collectives are gloo's and have no ports of their own.
        "VLLM_RBLN_AUTO_PORT": "0",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def torch_rbln_variables() -> dict[str, str]:
    """What gives a run of ours torch's device ``rbln``: torch-rbln alone of the vendor's wheels.

    Put over the variables of ``double_environment``.
    """
    site = next((vendor_python().parents[1] / "lib").glob("python*")) / "site-packages"
    alone = site.parents[2] / "torch-rbln"
    alone.mkdir(exist_ok=True)
    for entry in site.glob("torch_rbln*"):
        if not (alone / entry.name).exists():
            (alone / entry.name).symlink_to(entry)
    ours = double_environment(Path("unused"))["PYTHONPATH"]
    return {
        **_NATIVE,
        "LD_LIBRARY_PATH": str(native_library()),
        "PYTHONPATH": os.pathsep.join((ours, str(alone))),
    }
