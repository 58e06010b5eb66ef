"""Requirements of another release of vLLM that this environment does not meet."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.requirements import Requirement


def unmet(distribution: str) -> Iterator[str]:
    """Yield the unmet requirements of the first release on the path, with the installed version.

    Yield nothing for the locked release, the last one on the path: requirements/cpu.in omits some
    of its requirements on purpose, and these are skipped for other releases, too.
    """
    first, *others = importlib.metadata.distributions(name=distribution)
    left_out = {Requirement(line).name for other in others for line in other.requires or ()}
    for line in first.requires or () if others else ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if requirement.name not in left_out:
                yield f"{requirement.name}{requirement.specifier}: not installed"
            continue
        if version not in requirement.specifier:
            yield f"{requirement.name}{requirement.specifier}: {version} is installed"
