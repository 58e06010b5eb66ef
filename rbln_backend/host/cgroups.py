"""Where this process's control groups keep their limits, in versions 1 and 2 of them.

Only files below ``root`` are looked at, so that a test can describe another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of this process's groups for ``controller`` and of those around them."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in groups:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "" or controller in controllers.split(","):
            found += _chain(group, controller if controllers else "", mounts, root)
    return found


def _chain(group: str, controller: str, mounts: Sequence[str], root: Path) -> list[Path]:
    """From ``group`` up to where its hierarchy is mounted."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(maxsplit=2)
        if kind != ("cgroup" if controller else "cgroup2"):
            continue
        if controller and controller not in options.split(","):
            continue
        mount_root, mount_point = before.split()[3:5]
        top = root / mount_point.lstrip("/")
        # Inside a container the group may be named as the host sees it.
        inside = group[len(mount_root.rstrip("/")) :] if group.startswith(mount_root) else "/"
        folder = top / inside.strip("/")
        chain = [folder, *folder.parents]
        return chain[: chain.index(top) + 1]
    return []
