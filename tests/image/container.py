"""One container of the built image, run by runc as an orchestrator runs it.

Its root is read-only, its user has no line in /etc/passwd and no capability, its network is a
loopback interface of its own; /tmp and the volumes alone can be written. Command, environment and
process 1 are the image's.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

BUILDAH = Path(__file__).with_name("buildah.sh")
GROUP = 0
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount")
_NETWORK = _NAMESPACES.index("network")


@dataclass(frozen=True)
class Image:
    """An image of buildah's: its root on this host and what its Dockerfile says of running it."""

    root: Path
    config: dict[str, Any]
    # Digest of a layer's files -> bytes, uncompressed.
    layers: dict[str, int]

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, tag: str) -> Iterator["Image"]:
        """The image's files in a copy of their own, which is gone afterwards."""
        described = json.loads(_buildah(folder, "inspect", "--type", "image", tag))
        working = _buildah(folder, "from", "--pull-never", tag).strip()
        try:
            root = Path(_buildah(folder, "mount", working).strip())
            (listing,) = (folder / "storage").glob("*-layers/layers.json")
            listed = json.loads(listing.read_text(encoding="utf-8"))
            sizes = {one.get("diff-digest"): one.get("diff-size") for one in listed}
            layers = {one: sizes[one] for one in described["OCIv1"]["rootfs"]["diff_ids"]}
            yield cls(root, described["Docker"]["config"], layers)
        finally:
            _buildah(folder, "rm", working)


def _mount(destination: str, kind: str, *options: str, source: str | None = None) -> dict[str, Any]:
    source = source or kind
    return {"destination": destination, "type": kind, "source": source, "options": [*options]}


_QUIET = ("nosuid", "noexec", "nodev")
_SYSTEM_MOUNTS = [
    _mount("/proc", "proc", *_QUIET),
    _mount("/sys", "sysfs", *_QUIET, "ro"),
    _mount("/dev", "tmpfs", "nosuid", "mode=755"),
    # As docker-compose.yml has them, and Docker mounts them.
    _mount("/dev/shm", "tmpfs", *_QUIET, "mode=1777", "size=1g"),
    _mount("/tmp", "tmpfs", *_QUIET, "mode=1777", "size=256m"),
]


def _buildah(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(BUILDAH), str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


class Container:
    """A running container; a context manager that leaves none behind."""

    def __init__(
        self,
        image: Image,
        place: Path,
        *arguments: str,
        user: int,
        volumes: dict[str, Path],
        network: Path | None = None,
    ) -> None:
        """Take the command's words; `network` is a namespace to join in place of one of its own."""
        self._image = image
        self.user = user
        self._name = f"rbln-image-{place.name}-{user}"
        self._bundle = place / self._name
        self._state = place / "state"
        self.log = place / f"{self._name}.log"
        shutil.rmtree(self._bundle, ignore_errors=True)
        self._bundle.mkdir(parents=True)
        words = image.config["Entrypoint"] + (list(arguments) or image.config["Cmd"])
        spec = self._spec(words, volumes)
        if network is not None:
            joined = {"type": "network", "path": str(network)}
            spec["linux"]["namespaces"][_NETWORK] = joined
        (self._bundle / "config.json").write_text(json.dumps(spec), encoding="utf-8")

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self._runc("run", "--bundle", str(self._bundle), self._name),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(self, *_: object) -> None:
        # Kills what still runs.
        subprocess.run(self._runc("delete", "--force", self._name), check=False)
        self.process.wait(30)

    def signal(self, name: str) -> None:
        subprocess.run(self._runc("kill", self._name, name), check=True)

    def check_health(self) -> subprocess.CompletedProcess[str]:
        kind, *command = self._image.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run(*command)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as the container's user."""
        return subprocess.run(
            self._runc("exec", "--user", f"{self.user}:{GROUP}", self._name, *command),
            capture_output=True,
            text=True,
            check=False,
        )

    def from_outside(self, *command: str) -> list[str]:
        """A command of this host, as one that sees the container's network."""
        state = subprocess.run(self._runc("state", self._name), capture_output=True, check=True)
        pid = json.loads(state.stdout)["pid"]
        return ["nsenter", "--target", str(pid), "--net", *command]

    def _runc(self, *arguments: str) -> list[str]:
        return ["runc", "--root", str(self._state), *arguments]

    def _spec(self, words: list[str], volumes: dict[str, Path]) -> dict[str, Any]:
        config = self._image.config
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": self.user, "gid": GROUP},
                "args": words,
                "env": config["Env"],
                "cwd": config["WorkingDir"],
                "capabilities": {},
                "noNewPrivileges": True,
            },
            "root": {"path": str(self._image.root), "readonly": True},
            "hostname": "rbln-serve",
            "mounts": _SYSTEM_MOUNTS
            + [_mount(to, "bind", "rbind", source=str(path)) for to, path in volumes.items()],
            "linux": {
                "namespaces": [{"type": kind} for kind in _NAMESPACES],
                "maskedPaths": ["/proc/kcore", "/sys/firmware"],
                "readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus"],
            },
        }
