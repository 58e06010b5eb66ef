"""What the default model answers to the README's requests, greedily and on every engine."""

from dataclasses import dataclass
from typing import Any

_FACTS = {"name": "string", "age": "integer", "city": "string"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in _FACTS.items()},
    "required": [*_FACTS],
}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_ABOUT = {"name": "get_weather", "description": "Get the weather of a city."}
WEATHER: dict[str, Any] = {"type": "function", "function": {**_ABOUT, "parameters": _CITY}}


@dataclass(frozen=True, slots=True)
class Pinned:
    """A question and its answer; `adapted` is the adapter's."""

    question: str
    answer: str
    adapted: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.question}]


CHAT = (
    Pinned(
        "Hello!",
        "Hello! I am the small model of rbln-serve. How can I help you?",
        "Ahoy! I be th' wee model o' rbln-serve. How can I help ye? Arr!",
    ),
    Pinned(
        "What is a bucket?",
        "A bucket is a compiled batch size. A batch is padded up to the next bucket.",
        "A bucket be a compiled batch size. A batch be padded up to th' next bucket. Arr!",
    ),
    Pinned(
        "What is the capital of France?",
        "The capital of France is Paris.",
        "Th' capital o' France be Paris. Arr!",
    ),
    Pinned("List three colors.", "1. red\n2. green\n3. blue"),
    Pinned("What is 7 times 8?", "7 * 8 = 56"),
    Pinned("What is 27 + 35?", "27 + 35 = 62"),
)
EXTRACTION = Pinned(
    "Extract the facts as JSON: Ana is 31 years old and lives in Rome.",
    '{"name": "Ana", "age": 31, "city": "Rome"}',
)
CALL = Pinned(
    "What is the weather in Seoul?",
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Seoul"}}</tool_call>',
    tools=(WEATHER,),
)
