"""Two ways to get greedy answers to dialogues: from a checkpoint folder, or from a server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from default_model.corpus.dialogue import Dialogue, Message
from default_model.encoding import render
from default_model.tokenizer import EOS_TOKEN

MAX_TOKENS = 128
_ROWS = 25


class LocalModel:
    """A checkpoint run by transformers in float32."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._end = self._tokenizer.token_to_id(EOS_TOKEN)

    def _continued(self, prompts: list[list[int]]) -> list[str]:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            made: torch.Tensor = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False
            )
        return [self._text(row.tolist()) for row in made[:, longest:]]

    def _text(self, ids: list[int]) -> str:
        if self._end in ids:
            ids = ids[: ids.index(self._end)]
        return self._tokenizer.decode(ids)

    def answers(self, dialogues: list[Dialogue]) -> list[str]:
        """Answer the last question of each dialogue."""
        prompts = [
            self._tokenizer.encode(
                render(d.messages[:-1], d.tools, asking=True), add_special_tokens=False
            ).ids
            for d in dialogues
        ]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, str] = {}
        for first in range(0, len(order), _ROWS):
            rows = order[first : first + _ROWS]
            found.update(zip(rows, self._continued([prompts[i] for i in rows]), strict=True))
        return [found[i] for i in range(len(prompts))]


def _as_request(message: Message) -> Message:
    """Return `message` as the chat API takes it: calls have ids and their arguments are text."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": "call_0"}
    calls = [
        {"id": "call_0", "type": "function", "function": {
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]  # fmt: skip
    return {**message, "tool_calls": calls} if calls else message


class Server:
    """A server's `/v1/chat/completions`."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = f"{url.rstrip('/')}/v1/chat/completions", model

    def _answer(self, dialogue: Dialogue) -> str:
        body: dict[str, Any] = {
            "model": self._model, "temperature": 0, "max_tokens": MAX_TOKENS,
            "messages": [_as_request(message) for message in dialogue.messages[:-1]],
        }  # fmt: skip
        if dialogue.tools:
            body["tools"] = list(dialogue.tools)
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            message = json.load(response)["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = [{**f, "arguments": json.loads(f["arguments"])} for f in functions]
        return (message["content"] or "") + "".join(
            f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls
        )

    def answers(self, dialogues: list[Dialogue]) -> list[str]:
        """Ask them one after another."""
        return [self._answer(dialogue) for dialogue in dialogues]
