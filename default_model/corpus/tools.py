"""Requests that offer tools: calls, results put into a sentence, and talk that needs no tool."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from default_model.corpus import words
from default_model.corpus.arithmetic import draw_known
from default_model.corpus.dialogue import Dialogue, Message
from default_model.corpus.questions import topic

_VERBS = "get set find book order open close start stop send make check play move read".split()
_TYPES = {int: "integer", str: "string", float: "number"}


@dataclass(frozen=True, slots=True)
class Use:
    """A tool, a question for it, the arguments of the call, its result and what is said of it."""

    name: str
    description: str
    question: str
    arguments: dict[str, Any]
    result: Any
    said: str
    # As that of a dialogue.
    key: str = ""

    def schema(self, described: bool) -> dict[str, Any]:
        """Return the tool as a request offers it."""
        properties: dict[str, Any] = {}
        for key, value in self.arguments.items():
            properties[key] = {"type": _TYPES[type(value)]}
            if described and len(key) % 4 == 0:
                properties[key]["description"] = f"The {key}"
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        about = {"description": self.description} if described else {}
        function = {"name": self.name, **about, "parameters": parameters}
        return {"type": "function", "function": function}


def _weather(rng: Random) -> Use:
    city, degrees = words.city(rng), rng.randint(-9, 35)
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy"))
    ask = rng.choice(("What is the weather in {}?", "How is the weather in {}?",
                      "What's the weather in {} today?",
                      "Is it raining in {}?", "Tell me the weather in {}."))  # fmt: skip
    key = rng.choice(("city", "city", "city", "location"))
    result: Any = {"temperature": degrees, "sky": sky}
    said = f"It is {sky} in {city}, with {degrees} degrees."
    about = rng.choice(
        ("Get the weather of a city.", "Get the weather in a city.", "Current weather")
    )
    return Use("get_weather", about, ask.format(city), {key: city}, result, said)


def _time(rng: Random) -> Use:
    city, now = words.city(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    ask = rng.choice(
        ("What time is it in {}?", "Tell me the time in {}.", "What is the time in {}?")
    )
    said = f"It is {now} in {city}."
    return Use("get_time", "Get the time in a city.", ask.format(city), {"city": city}, now, said)


def _calculator(rng: Random) -> Use:
    solved = draw_known(rng)
    expression, value = solved.answer["content"].split(" = ")
    question = f"What is {expression}?"
    return Use("calculator", "Compute an expression.", question, {"expression": expression},
               int(value),
               f"{expression} = {value}", solved.key)  # fmt: skip


def _search(rng: Random) -> Use:
    text = rng.choice(
        (words.word(rng), f"{rng.choice(words.words('adjectives'))} {words.word(rng)}")
    )
    ask = rng.choice(("Search for {}.", "Find something about {}.", "Look up {}."))
    return Use("search", "Search the web.", ask.format(text), {"query": text},
               f"A page about {text}.",
               f"I found a page about {text}.")  # fmt: skip


def _message(rng: Random) -> Use:
    name, text = words.name(rng), words.sentence(rng)
    ask = rng.choice(("Send {} the message: {}", "Write to {}: {}", "Tell {} this: {}"))
    return Use("send_message", "Send a message.", ask.format(name, text), {"to": name,
                                                                           "text": text}, "sent",
               f"I sent the message to {name}.")  # fmt: skip


def _timer(rng: Random) -> Use:
    minutes = rng.randint(1, 90)
    ask = rng.choice(
        ("Set a timer for {} minutes.", "Start a timer of {} minutes.", "Wake me in {} minutes.")
    )
    return Use("set_timer", "Set a timer.", ask.format(minutes), {"minutes": minutes}, "started",
               f"The timer runs for {minutes} minutes.")  # fmt: skip


def _invented(rng: Random) -> Use:
    verb, thing = rng.choice(_VERBS), rng.choice((words.invented(rng), words.word(rng)))
    keys = rng.sample(
        ("name", "city", "count", "color", "item", words.invented(rng)), rng.randint(1, 2)
    )
    drawn: dict[str, Any] = {
        "name": words.name(rng), "city": words.city(rng), "count": rng.randint(1, 30),
        "color": rng.choice(words.words("colors")), "item": rng.choice(words.words("things")),
    }  # fmt: skip
    values = {key: drawn.get(key, words.word(rng)) for key in keys}
    told = " and ".join(f"{key} {value}" for key, value in values.items())
    ask = rng.choice(("Please {verb} the {thing} with {told}.", "{Verb} the {thing}: {told}.",
                      "Can you {verb} the {thing} for {told}?"))  # fmt: skip
    return Use(f"{verb}_{thing}", f"{verb.capitalize()} the {thing}.",
               ask.format(verb=verb, Verb=verb.capitalize(), thing=thing, told=told), values,
               "done",
               f"Done: {told}.")  # fmt: skip


_KNOWN = (_weather, _weather, _time, _calculator, _search, _message, _timer)


def _use(rng: Random) -> Use:
    return _invented(rng) if rng.random() < 0.3 else rng.choice(_KNOWN)(rng)


def _offer(rng: Random, use: Use) -> tuple[dict[str, Any], ...]:
    offered = {use.name: use}
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        other = _use(rng)
        offered.setdefault(other.name, other)
    tools = [one.schema(rng.random() < 0.8) for one in offered.values()]
    rng.shuffle(tools)
    return tuple(tools)


def _answer(rng: Random, use: Use) -> Message:
    """A call; sometimes in the form that `tool_choice` of required or of a name forces."""
    way = rng.random()
    if way < 0.07:
        forced = json.dumps([{"name": use.name, "parameters": use.arguments}])
        return {"role": "assistant", "content": forced}
    if way < 0.11:
        return {"role": "assistant", "content": json.dumps(use.arguments)}
    call = {"type": "function", "function": {"name": use.name, "arguments": use.arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def draw_call(rng: Random) -> Dialogue:
    """Draw a request that one of its tools answers."""
    use = _use(rng)
    tools = _offer(rng, use)
    turns = ({"role": "user", "content": use.question}, _answer(rng, use))
    return Dialogue(turns, tools, key=use.key)


def draw_result(rng: Random) -> Dialogue:
    """Draw a call, its result and the sentence about it."""
    use = _use(rng)
    call = {"type": "function", "function": {"name": use.name, "arguments": use.arguments}}
    result = use.result if isinstance(use.result, str) else json.dumps(use.result)
    turns = (
        {"role": "user", "content": use.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": use.said},
    )
    return Dialogue(turns, _offer(rng, use), key=use.key)


def draw_talk(rng: Random) -> Dialogue:
    """Draw a question that needs no tool although there are some."""
    talk = topic(rng.choice(("smalltalk", "about", "service")))(rng)
    return Dialogue(talk.messages, _offer(rng, _use(rng)))
