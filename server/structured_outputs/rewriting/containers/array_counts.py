"""Counted items of arrays as states: items so far, and those that each `contains` has counted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.containers.counts import MAX_STATES, CountRange
from server.structured_outputs.rewriting.document import Node
from server.structured_outputs.rewriting.shapes import CountedArray, CountedItem

ItemCounts = tuple[int, ...]
"""Number of items, then the number that each `contains` has counted; see `CountRange.size`."""
Steps = list[tuple[Node, ItemCounts]]
"""Items that may follow, each with the counts after it."""


def count_steps(
    shape: CountedArray, is_possible: Callable[[Node], bool]
) -> dict[ItemCounts, tuple[Steps, bool]]:
    """Return the counts from which an array can be completed, without items that cannot exist.

    Each has its steps, and True if the array may end there. Raises `UnusableError` above
    `MAX_STATES`.
    """
    # Counts below the number of listed items differ, because their options do.
    fewest = max(shape.least, len(shape.first))
    ranges = [CountRange(fewest if shape.most is None else shape.least, shape.most)]
    ranges += [CountRange(least, most) for least, most in shape.contained]
    states = 1
    for item in ranges:
        states *= item.size
    if states > MAX_STATES:
        raise UnusableError(
            f"counting the items of 'contains' takes {states} rules; the limit is {MAX_STATES}"
        )
    steps: dict[ItemCounts, Steps] = {}
    for counts in product(*(range(item.size) for item in ranges)):
        options = [
            (option, _after(ranges, counts, option))
            for option in shape.options(counts[0])
            if is_possible(option.node)
        ]
        steps[counts] = [(option.node, after) for option, after in options if after is not None]
    ends = {
        counts
        for counts in steps
        if counts[0] >= shape.least and all(map(CountRange.is_enough, ranges[1:], counts[1:]))
    }
    live = _live(steps, ends)
    return {
        counts: ([step for step in steps[counts] if step[1] in live], counts in ends)
        for counts in steps
        if counts in live
    }


def _after(ranges: list[CountRange], counts: ItemCounts, option: CountedItem) -> ItemCounts | None:
    """Return the counts after an item; None if there are too many, or if it counts for nothing."""
    after = [ranges[0].after(counts[0])]
    for index, (item, count) in enumerate(zip(ranges[1:], counts[1:], strict=True)):
        more = item.after(count) if index in option.counts else count
        if index in option.counts and more == count:
            # Enough are counted: the option that does not count this one has all its items.
            return None
        after.append(more)
    found = tuple(count for count in after if count is not None)
    return found if len(found) == len(after) else None


def _live(steps: dict[ItemCounts, Steps], ends: set[ItemCounts]) -> set[ItemCounts]:
    """Return the counts from which one of `ends` can be reached."""
    before: dict[ItemCounts, list[ItemCounts]] = {}
    for counts, found in steps.items():
        for _, after in found:
            before.setdefault(after, []).append(counts)
    live, waiting = set(ends), list(ends)
    while waiting:
        for counts in before.get(waiting.pop(), ()):
            if counts not in live:
                live.add(counts)
                waiting.append(counts)
    return live
