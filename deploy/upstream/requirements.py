"""What another release of vLLM requires and this environment does not have."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.requirements import Requirement


def unmet(distribution: str) -> Iterator[str]:
    """Yield what the release that is found first requires, and what there is instead.

    Nothing for the release that is locked, the last one that is found: what it requires and does
    not need is left out on purpose (requirements/cpu.in), and so is that of the others.
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
