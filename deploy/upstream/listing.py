"""The list of used names of vLLM, and the differences between two releases."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.upstream.shapes import AbsentError, readers, shape, short, signature
from deploy.upstream.uses import Uses


@dataclass(frozen=True)
class Found:
    """The used names in the installed vLLM."""

    shapes: Mapping[str, str]
    """The shape of each name of the list."""
    absent: tuple[str, ...]
    """Imports and replacements of ours that fail, with the reason."""
    refused: tuple[str, ...]
    """Arguments that vLLM may pass to an override of ours that does not accept them."""


def look_up(uses: Uses) -> Found:
    """Look up all uses. Members that vLLM lacks count as our own."""
    shapes, absent = {}, []
    for name in sorted(uses.names):
        try:
            shapes[name] = shape(name)
        except AbsentError as error:
            absent.append(f"{name}: {error}")
    for name in sorted(uses.replaced):
        try:
            shape(name)
        except AbsentError as error:
            absent.append(f"{name}, which we replace: {error}")
    for name in sorted(uses.members):
        try:
            shapes[short(name)] = shape(name) + (readers(name) if name in uses.steered else "")
        except AbsentError:
            continue
    return Found(shapes, tuple(absent), tuple(_refused(uses)))


def read_list(path: Path) -> dict[str, str]:
    """Return the shapes that `write_list` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def write_list(shapes: Mapping[str, str], path: Path) -> None:
    """Write one line for each name, with its shape."""
    path.write_text("".join(f"{name} {shapes[name]}\n" for name in sorted(shapes)), "utf-8")


def breaks(recorded: Mapping[str, str], found: Found) -> Iterator[tuple[str, list[str]]]:
    """Yield the kinds of differences that break this project, or may, each with its lines."""
    shapes = found.shapes
    common = sorted(recorded.keys() & shapes.keys())
    missing = {line.partition(":")[0] for line in found.absent}
    gone = [name for name in sorted(recorded.keys() - shapes.keys()) if name not in missing]
    changed = [name for name in common if recorded[name] != shapes[name]]
    yield "imports and replacements that fail", list(found.absent)
    yield "members that are gone", [f"{name} {recorded[name]}" for name in gone]
    yield (
        "names with another shape",
        [f"{name}: {_difference(recorded[name], shapes[name])}" for name in changed],
    )
    yield "overrides that do not accept vLLM's arguments", list(found.refused)
    yield (
        "only in this release",
        [f"{n} {shapes[n]}" for n in sorted(shapes.keys() - recorded.keys())],
    )


def _difference(was: str, now: str) -> str:
    """Return the removed and the added parts of a shape; whole lists of parameters are long."""
    parts = re.compile(r",? (?:of )?|[()]")
    before, after = ([p for p in parts.split(text) if p] for text in (was, now))
    gone = [f"-{part}" for part in before if part not in after]
    new = [f"+{part}" for part in after if part not in before]
    return " ".join(gone + new) or "another order"


def _refused(uses: Uses) -> Iterator[str]:
    for (name, class_name), ours in sorted(uses.overrides.items()):
        try:
            theirs = signature(name)
        except AbsentError:
            continue
        method = name.rpartition(".")[2]
        if theirs is None or method == "__init__":
            continue
        for problem in refusals(ours, theirs):
            yield f"{class_name}.{method}: {problem}"


def refusals(ours: inspect.Signature, theirs: inspect.Signature) -> Iterator[str]:
    """Yield the reasons why `ours` does not accept the arguments of `theirs`."""
    kinds = inspect.Parameter
    by_place = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    variable = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    taken, passed = _without_self(ours), _without_self(theirs)
    any_place = any(p.kind is kinds.VAR_POSITIONAL for p in taken)
    any_name = any(p.kind is kinds.VAR_KEYWORD for p in taken)
    places = sum(p.kind in by_place for p in taken)
    for index, parameter in enumerate(passed):
        named = any_name or parameter.name in ours.parameters
        if not named and parameter.kind is not kinds.VAR_POSITIONAL:
            yield f"takes no {parameter.name}"
        elif parameter.kind in by_place and not any_place and index >= places:
            yield f"takes {parameter.name} by name only"
    for parameter in taken:
        needed = parameter.kind not in variable and parameter.default is parameter.empty
        if needed and parameter.name not in theirs.parameters:
            yield f"needs {parameter.name}, which vLLM does not pass"


def _without_self(found: inspect.Signature) -> list[inspect.Parameter]:
    parameters = list(found.parameters.values())
    return parameters[1:] if next(iter(found.parameters), "") in ("self", "cls") else parameters
