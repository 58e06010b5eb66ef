"""Sessions of coding agents: requests of the shape that Claude Code and Codex send, turn by turn.

Written from the public documentation of both APIs and of what the clients send; the words are
filler. A session's history is its own and not the model's: every server gets the same requests.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

Body = dict[str, Any]
Head = Callable[[int], str]
"""Returns the first line of the system prompt, by turn."""

TOOLS = (
    *"Read Write Edit MultiEdit Bash BashOutput KillShell Glob Grep".split(),
    *"LS Task TodoWrite WebFetch NotebookRead NotebookEdit ExitPlanMode".split(),
    *"SlashCommand AskUser ListResources ReadResource Skill Lsp Diff Test".split(),
)
CACHED = {"type": "ephemeral"}
_WORDS = (
    "file path line edit command output before after always never project change test run read "
    "write search result error user short whole first last other name value list of the and"
).split()


def billing(turn: int) -> str:
    """Return the first line of Claude Code's system prompt; its end changes with every turn."""
    return f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={turn:05x};"


class Session:
    """One session of texts made of `words`; `scale` lengthens them."""

    def __init__(
        self,
        seed: int = 0,
        scale: float = 1.0,
        head: Head | None = None,
        words: Sequence[str] = _WORDS,
    ) -> None:
        self._words = words
        self._chooser = random.Random(seed)
        self._scale = scale
        self._head = head
        self._system = [self._text(120), self._text(900)]
        self._tools = [(name, self._text(40), self._schema()) for name in TOOLS]
        self._task = self._text(40)
        self._steps: list[tuple[str, str, Body, str]] = []

    def step(self) -> None:
        """Add a turn: the agent's text, its tool call with arguments, and the result."""
        name = self._chooser.choice(TOOLS)
        given = {"path": self._text(3), "text": self._text(12)}
        self._steps.append((self._text(15), name, given, self._text(90)))

    def messages(self, model: str, max_tokens: int) -> Body:
        """Return Claude Code's next request for `/v1/messages`."""
        system = [{"type": "text", "text": text, "cache_control": CACHED} for text in self._system]
        if self._head is not None:
            system.insert(0, {"type": "text", "text": self._head(len(self._steps))})
        turns: list[Body] = [{"role": "user", "content": [{"type": "text", "text": self._task}]}]
        for number, (said, name, given, result) in enumerate(self._steps):
            use = {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": given}
            answer = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": result}
            turns.append({"role": "assistant", "content": [{"type": "text", "text": said}, use]})
            turns.append({"role": "user", "content": [answer]})
        turns[-1]["content"][-1]["cache_control"] = CACHED
        return {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "system": system,
            "messages": turns,
            "tools": [
                {"name": name, "description": about, "input_schema": schema}
                for name, about, schema in self._tools
            ],
            "metadata": {"user_id": "user_0_account__session_0"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        }

    def responses(self, model: str, max_tokens: int) -> Body:
        """Return Codex's next request for `/v1/responses`."""
        head = [] if self._head is None else [self._head(len(self._steps))]
        items: list[Body] = [
            _item("developer", self._system[0]),
            _item("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
            _item("user", self._task),
        ]
        for number, (said, name, given, result) in enumerate(self._steps):
            call = {"type": "function_call", "call_id": f"call_{number}", "name": name}
            output = {"type": "function_call_output", "call_id": f"call_{number}", "output": result}
            said_item = {"type": "output_text", "text": said}
            items.append({"type": "message", "role": "assistant", "content": [said_item]})
            items += [call | {"arguments": str(given).replace("'", '"')}, output]
        return {
            "model": model,
            "instructions": "\n".join([*head, self._system[1]]),
            "input": items,
            "tools": [
                {
                    "type": "function",
                    "name": name,
                    "description": about,
                    "parameters": schema,
                    "strict": False,
                }
                for name, about, schema in self._tools
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "max_output_tokens": max_tokens,
            "temperature": 0,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "session-0",
        }

    def _text(self, words: int) -> str:
        count = max(1, round(words * self._scale))
        return " ".join(self._chooser.choice(self._words) for _ in range(count))

    def _schema(self) -> Body:
        names = self._chooser.sample(_WORDS[:20], self._chooser.randrange(2, 5))
        return {
            "type": "object",
            "properties": {
                name: {"type": "string", "description": self._text(8)} for name in names
            },
            "required": names[:1],
            "additionalProperties": False,
        }


def _item(role: str, text: str) -> Body:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
