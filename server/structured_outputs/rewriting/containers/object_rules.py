"""Rules of objects: members in the order of the schema, in any order, or counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.containers.counts import MAX_STATES, CountRange, several

MAX_TRACKED = 64
"""Most members that a rule tracks: llguidance has 64 bits."""
MAX_RUN = 32
"""Most required members that are written into one rule."""


class RuleSet(Protocol):
    """Part of `Rules` that defines rules."""

    def add(self, stem: str, *options: str, counts: bool = False) -> str:
        """Add a rule of these options and return its name."""
        ...

    def new_name(self, stem: str) -> str:
        """Return a name that no rule has."""
        ...

    def define(self, name: str, *options: str, counts: bool = False) -> None:
        """Add a rule of this name."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A listed property in the grammar: its name, a colon and its value."""

    text: str
    required: bool


@dataclass(frozen=True, slots=True)
class ObjectRules:
    """Writes the rule of one object: the `listed` members and any number of `other` ones.

    A `last` member comes at the end, because a later member of its name would replace its value.
    """

    rules: RuleSet
    listed: list[Member]
    other: str | None
    bounds: CountRange
    last: str | None = None

    def options(self, *, any_order: bool) -> list[str]:
        """Return the options of the object's rule; none if there is no such object."""
        if any_order and len(self.listed) > 1 and self._may_mix():
            return self._mixed()
        if self.bounds.least == 0 and self.bounds.most is None:
            return [f"OPEN {self._in_order()} CLOSE"]
        return self._counted()

    def _may_mix(self) -> bool:
        """Return True if members in any order can be counted."""
        if self.last is not None and (self.bounds.least or self.bounds.most is not None):
            return False
        counted = self.other is None and len(self.listed) <= MAX_TRACKED
        needed = sum(item.required for item in self.listed)
        if needed > MAX_TRACKED:
            return False
        return counted or (self.bounds.least <= needed and self.bounds.most is None)

    def _mixed(self) -> list[str]:
        """Return the options of members in any order: a bit for each one that is there.

        Beyond `MAX_TRACKED`, an optional member may be repeated, which JSON permits.
        """
        required = [item for item in self.listed if item.required]
        needed = len(required)
        free = None if self.bounds.most is None else self.bounds.most - needed
        if free is not None and (free < 0 or self.bounds.most == 0):
            return [] if free < 0 or self.bounds.least else ["OPEN CLOSE"]
        optional = [item for item in self.listed if not item.required and free != 0]
        listed = required + optional
        tracked = min(len(listed), MAX_TRACKED)
        stem = self.rules.new_name("mixed")
        item, more = f"{stem}i", f"{stem}n"
        others = f"(COMMA {self.other})*" if self.other else '""'
        bits = f"[0:{tracked}]"
        # Optional members leave room for the required ones.
        limited = free is not None and free < len(optional)
        limit = [f"bit_count_lt([{needed}:{tracked}], {free})"] if limited else []
        members = []
        for index, member in enumerate(listed):
            conditions = [f"bit_clear({index})", *(limit if index >= needed else ())]
            after = f"set_bit({index}){_if(conditions)}" if index < tracked else "_"
            members.append(f"{member.text} {more}::{after}")
        ends = [f"is_ones([0:{needed}])"] if needed else []
        if self.bounds.least > needed:
            ends.append(f"bit_count_ge({bits}, {self.bounds.least})")
        # No comma where no member is left: the answer could not go on.
        most = tracked if self.bounds.most is None else min(self.bounds.most, tracked)
        room = f" %if bit_count_lt({bits}, {most})" if tracked == len(listed) else ""
        self.rules.define(item, *members, counts=True)
        self.rules.define(
            more,
            f"{others}{f' COMMA {self.last}' if self.last else ''}{_if(ends)}",
            f"{others} COMMA {item}::_{room}",
            counts=True,
        )
        found = [f"OPEN {item}::0 CLOSE"]
        found += [f"OPEN {self.other} {more}::0 CLOSE"] if self.other else []
        if needed or self.bounds.least:
            return found
        return [*found, f"OPEN {self.last or ''} CLOSE"]

    def _in_order(self) -> str:
        """Return the members between the braces: `fresh` before the first one, `rest` after it."""
        other = self.other
        fresh = [f"({other} (COMMA {other})*)?"] if other else [""]
        rest = f"(COMMA {other})*" if other else ""
        if self.last:
            rest = f"{rest} COMMA {self.last}"
            fresh = [f"({other} COMMA)* {self.last}" if other else self.last]
        for index in range(len(self.listed) - 1, -1, -1):
            member = self.listed[index]
            first, after = f"{member.text} {rest}", f"COMMA {member.text} {rest}"
            fresh = [first] if member.required else [first, *fresh]
            if index == 0:
                break
            if not member.required:
                rest = self.rules.add("rest", after, rest)
            elif self.listed[index - 1].required and index % MAX_RUN:
                rest = after
            else:
                rest = self.rules.add("rest", after)
        if len(fresh) == 1:
            return fresh[0]
        return f"({' | '.join(filter(None, fresh))}){'' if all(fresh) else '?'}"

    def _counted(self) -> list[str]:
        """Return the rules of counted members: one for each valid place and count."""
        bounds = self.bounds
        if self.other is None and bounds.most is not None and bounds.most >= len(self.listed):
            bounds = CountRange(bounds.least, None)
        if len(self.listed) * bounds.size > MAX_STATES:
            raise UnusableError(
                f"counting its properties takes {len(self.listed) * bounds.size} rules; the limit "
                f"is {MAX_STATES}"
            )
        counts = range(min(bounds.size, len(self.listed) + 1))
        ends = {count: self._others(bounds, count) for count in counts}
        for member in reversed(self.listed):
            places: dict[int, str | None] = {}
            for count in counts:
                comma = "COMMA " if count else ""
                after = bounds.after(count)
                taken = ends.get(after) if after is not None else None
                options = [f"{comma}{member.text} {taken}"] if taken is not None else []
                skipped = ends[count]
                if not member.required and skipped is not None:
                    options.append(skipped)
                places[count] = self.rules.add("members", *options) if options else None
            ends = places
        start = ends[0]
        return [] if start is None else [f"OPEN {start} CLOSE"]

    def _others(self, bounds: CountRange, count: int) -> str | None:
        """Return the unlisted members after `count` listed ones; None if no number is valid.

        Unlisted members may repeat a name, so that they count once towards the least number.
        """
        missing = bounds.least - count
        room = None if bounds.most is None else bounds.most - count
        if self.last:
            return self._others_and_last(missing, room, count)
        if missing > (self.other is not None and room != 0):
            return None
        if self.other is None or room == 0:
            return '""'
        low = max(0, missing)
        if count:
            return several(f"COMMA {self.other}", low, room)
        left = None if room is None else room - 1
        some = f"{self.other} {several(f'COMMA {self.other}', 0, left)}"
        return some if low else f"({some})?"

    def _others_and_last(self, missing: int, room: int | None, count: int) -> str | None:
        """Return the unlisted members and the last one, whose name may repeat another's."""
        if missing > 1 or room == 0:
            return None
        more = None if room is None else room - 1
        if self.other is None or more == 0:
            return f"COMMA {self.last}" if count else self.last
        if count:
            return f"{several(f'COMMA {self.other}', 0, more)} COMMA {self.last}"
        return f"{several(f'{self.other} COMMA', 0, more)} {self.last}"


def _if(conditions: list[str]) -> str:
    if not conditions:
        return ""
    return f" %if {conditions[0]}" if len(conditions) == 1 else f" %if and({', '.join(conditions)})"
