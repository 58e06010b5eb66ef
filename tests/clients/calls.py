"""Runs in the clients' own Python: ``calls.py URL`` prints a JSON object, call by call."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

MODEL = "default-model"
SUM = "What is 12 times 7?"
WEATHER = "What is the weather in Paris?"
TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def langchain(url: str) -> dict[str, Callable[[], Any]]:
    """langchain-openai: invoke, stream, tools, structured output."""
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        """Get the weather of a city."""

        city: str

    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0)
    bound = chat.bind_tools([Weather], tool_choice="Weather")
    return {
        "invoke": lambda: chat.invoke(SUM).content,
        "stream": lambda: "".join(str(part.content) for part in chat.stream(SUM)),
        "tool": lambda: bound.invoke(WEATHER).tool_calls[0]["args"],
        "structured": lambda: chat.with_structured_output(Weather).invoke(WEATHER).model_dump(),
    }


def llama_index(url: str) -> dict[str, Callable[[], Any]]:
    """llama-index: complete, chat, stream, a forced tool."""
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"sunny in {city}"

    options: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True}
    model = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", temperature=0, **options)
    asked = [ChatMessage(role="user", content=SUM)]
    tool = FunctionTool.from_defaults(get_weather)

    def forced() -> Any:
        answer = model.chat_with_tools([tool], user_msg=WEATHER, tool_required=True)
        return model.get_tool_calls_from_response(answer)[0].tool_kwargs

    return {
        "chat": lambda: model.chat(asked).message.content,
        "stream": lambda: list(model.stream_chat(asked))[-1].message.content,
        "forced tool": forced,
    }


def instructor(url: str) -> dict[str, Callable[[], Any]]:
    """instructor: an object by tools and by JSON schema."""
    import instructor as library
    from openai import OpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    def made(mode: Any) -> Callable[[], Any]:
        client = library.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        asked = [{"role": "user", "content": WEATHER}]

        def call() -> Any:
            found = client.chat.completions.create(
                model=MODEL, messages=asked, response_model=Weather, temperature=0, max_retries=0
            )
            return found.model_dump()

        return call

    return {"tools": made(library.Mode.TOOLS), "schema": made(library.Mode.JSON_SCHEMA)}


def litellm(url: str) -> dict[str, Callable[[], Any]]:
    """litellm: completion whole and streamed, over OpenAI's and Anthropic's form."""
    import litellm as library

    asked = [{"role": "user", "content": SUM}]
    own = {"api_key": "none", "messages": asked, "temperature": 0, "max_tokens": 32}

    def whole(model: str, base: str) -> Any:
        return library.completion(model=model, api_base=base, **own).choices[0].message.content

    def streamed() -> Any:
        parts = library.completion(
            model=f"openai/{MODEL}", api_base=f"{url}/v1", stream=True, **own
        )
        return "".join(part.choices[0].delta.content or "" for part in parts)

    return {
        "openai": lambda: whole(f"openai/{MODEL}", f"{url}/v1"),
        "openai, streamed": streamed,
        "anthropic": lambda: whole(f"anthropic/{MODEL}", url),
    }


def main() -> None:
    """Make every call; what it raised stands in place of what it returned."""
    found: dict[str, dict[str, Any]] = {}
    for client in (langchain, llama_index, instructor, litellm):
        found[client.__name__] = told = {}
        for name, call in client(sys.argv[1]).items():
            try:
                told[name] = call()
            except Exception:  # noqa: BLE001 (whatever it was is the finding)
                told[name] = traceback.format_exc(limit=-3)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
