"""JSON texts near a schema: documents changed a little, and in other spellings of their strings."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_VALUES: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2.5, "", "a", "x", 'a"b', "a\\b", [], {})
_SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\n": "\\n", "\t": "\\t"}


class InstanceGenerator:
    """Changes documents towards what a schema names; the same seed makes the same ones."""

    def __init__(self, schema: Any, seed: int) -> None:
        self._random = random.Random(seed)
        self._names: list[str] = ["a", "zz"]
        self._values: list[Any] = list(_VALUES)
        self._collect(schema)

    def near(self, documents: list[str], count: int) -> Iterator[str]:
        """Yield texts: values that the schema names, and changed documents."""
        values = [json.loads(text) for text in documents]
        for _ in range(count):
            value = self._random.choice([*values, *self._values])
            for _ in range(self._random.randint(0, 2)):
                value = self._changed(value)
            yield self._spelled(value)

    def _collect(self, schema: Any) -> None:
        if isinstance(schema, list):
            for item in schema:
                self._collect(item)
        if not isinstance(schema, dict):
            return
        for key, value in schema.items():
            if key == "enum":
                self._values += value
            elif key == "const":
                self._values.append(value)
            elif key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                self._values += [value, value + 1, value - 1]
            elif key in ("required", "properties", "dependentRequired", "dependentSchemas"):
                self._names += value
            self._collect(value)

    def _changed(self, value: Any) -> Any:
        pick = self._random
        if isinstance(value, dict) and value and pick.random() < 0.8:
            return self._changed_object(value)
        if isinstance(value, dict):
            return {pick.choice(self._names): pick.choice(self._values)}
        if isinstance(value, list) and pick.random() < 0.8:
            items = list(value)
            if items and pick.random() < 0.5:
                place = pick.randrange(len(items))
                items[place] = self._changed(items[place])
                return items
            items.insert(pick.randint(0, len(items)), pick.choice([*items, *self._values]))
            return items
        return pick.choice(self._values)

    def _changed_object(self, value: dict[str, Any]) -> dict[str, Any]:
        pick = self._random
        pairs = list(value.items())
        place = pick.randrange(len(pairs))
        kind = pick.randrange(4)
        if kind == 0:
            pairs[place] = (pick.choice(self._names), pairs[place][1])
        elif kind == 1:
            pairs[place] = (pairs[place][0], self._changed(pairs[place][1]))
        elif kind == 2:
            del pairs[place]
        else:
            pairs.insert(place, (pick.choice(self._names), pick.choice(self._values)))
        return dict(pairs)

    def _spelled(self, value: Any) -> str:
        """Return a text of the value in which characters may be escaped that need not be."""
        if isinstance(value, dict):
            pairs = (f"{self._string(key)}: {self._spelled(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(self._spelled, value))}]"
        return self._string(value) if isinstance(value, str) else json.dumps(value)

    def _string(self, text: str) -> str:
        plain = json.dumps(text, ensure_ascii=False)
        if self._random.random() < 0.7:
            return plain
        return f'"{"".join(map(self._escaped, text))}"'

    def _escaped(self, character: str) -> str:
        if self._random.random() < 0.4 and character >= " " and character not in '"\\':
            return character
        if character in _SHORT and self._random.random() < 0.5:
            return _SHORT[character]
        form = "{:04x}" if self._random.random() < 0.5 else "{:04X}"
        units = character.encode("utf-16-be", "surrogatepass")
        pairs = (units[place : place + 2] for place in range(0, len(units), 2))
        return "".join(f"\\u{form.format(int.from_bytes(pair))}" for pair in pairs)
