"""Chat templates of large conversations in another process, and texts that are no control tokens.

A rendering is Python code of the template's author over a client's lists: in the process that reads
large bodies it has a limit of time and of memory, and holds no thread of this one up.

A template writes control tokens such as `<|im_end|>` as text, and the tokenizer reads them back
from the whole prompt: the same characters in a message would begin a turn of their own. Where the
strings of a conversation hold such text, a mark is put inside it before the template is rendered.
The mark moves through the template with the text. The prompt is then tokenized without the marks,
and a control token that has one inside is spelled like any other text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import re
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex

from jinja2 import TemplateError, nodes
from pydantic_core import to_json
from tokenizers import AddedToken, Encoding, Tokenizer

from server.errors import ContextLengthError
from server.vllm.patches import use_template_renderer
from server.vllm.templates import is_bounded, parsed

if TYPE_CHECKING:
    from vllm.renderers.online_renderer import OnlineRenderer

NONCHARACTERS = range(0xFDD0, 0xFDF0)
"""Code points that no text has; in a marked conversation those of clients become U+FFFD."""
_MARK = chr(NONCHARACTERS[0])
# Also as JSON and Python escape it, because templates print objects in both forms.
_WRITTEN_MARK = re.compile(rf"{_MARK}|\\u{ord(_MARK):04x}")
_FOREIGN = re.compile(f"[{chr(NONCHARACTERS[0])}-{chr(NONCHARACTERS[-1])}]")
_OF_ANSWERS = re.compile("think|tool|call|function|arg_|param|channel|reason", re.IGNORECASE)
"""Control tokens of thinking and of calls, which templates look for in an assistant's text."""
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_CACHED = 32


class SpelledPrompt(str):
    """A prompt in which a control token with one of `marks` inside is text.

    A mark is a position between two characters, in ascending order. Slices keep their marks,
    because vLLM cuts texts before it tokenizes them.
    """

    __slots__ = ("marks",)
    marks: tuple[int, ...]

    def __new__(cls, text: str, marks: Iterable[int]) -> SpelledPrompt:
        prompt = super().__new__(cls, text)
        prompt.marks = tuple(marks)
        return prompt

    def __reduce__(self) -> Any:
        """Send the marks, too."""
        return SpelledPrompt, (str(self), self.marks)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        """Return a part; a slice of consecutive characters keeps its marks."""
        text = super().__getitem__(key)
        if not isinstance(key, slice) or key.step not in (None, 1):
            return text
        start, stop, _ = key.indices(len(self))
        return SpelledPrompt(text, (mark - start for mark in self.marks if start < mark < stop))


class ControlTokens:
    """The texts of the control tokens of a template, and the roles that it knows."""

    def __init__(self, texts: frozenset[str], roles: frozenset[str] = ROLES) -> None:
        self.texts, self.roles = texts, roles
        self._everywhere = _Pattern(texts)
        self._in_answers = _Pattern(text for text in texts if not _OF_ANSWERS.search(text))
        self._joined = "\0".join(texts)

    def __reduce__(self) -> Any:
        """Send the texts alone; another process caches what is made of them."""
        return _control_tokens, (self.texts, self.roles)

    def may_occur(self, conversation: Any, variables: Mapping[str, Any]) -> bool:
        """Return False if no string can become a control token or a part of one."""
        if any(message.get("role") not in self.roles for message in conversation):
            return True
        data = to_json([conversation, variables], serialize_unknown=True, inf_nan_mode="constants")
        whole, head, tail = self._everywhere.rough
        begins = any(char.encode() in data for char in self._everywhere.first)
        return (begins and bool(whole.search(data) or head.search(data))) or bool(tail.search(data))

    def mark(
        self, conversation: Any, variables: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return copies with a mark inside of each text that could become a control token."""
        turns = [dict(self._fields(message)) for message in conversation]
        return turns, {key: _marked(value, self._everywhere) for key, value in variables.items()}

    def _fields(self, message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in message.items():
            if key == "content" and message.get("role") == "assistant":
                yield key, _marked(value, self._in_answers)
            elif key == "role" and value in self.roles:
                yield key, value
            else:
                # A template may write an unknown role between the two halves of a token.
                half = key == "role" and value in self._joined
                marked = _marked(value, self._everywhere)
                yield _marked(key, self._everywhere), _MARK + marked if half else marked


@lru_cache(maxsize=_CACHED)
def _control_tokens(texts: frozenset[str], roles: frozenset[str]) -> ControlTokens:
    return ControlTokens(texts, roles)


def get_control_tokens(template: str, added: Iterable[AddedToken], named: str) -> ControlTokens:
    """Return the control tokens among a tokenizer's added tokens.

    These are the special tokens, and others that the template or `named` has, in either form:
    `<think>` or `</think>`. Other added tokens are words that the model knows as one piece.
    """
    try:
        tree = parsed(template)
    except TemplateError:
        texts, words = [named], []
    else:
        words = [n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)]
        texts = [named, *words, *(n.data for n in tree.find_all(nodes.TemplateData))]
    written = "\0".join(texts).replace("/", "")
    control = (
        token.content
        for token in added
        if is_control(token.content)
        and (token.special or token.content.replace("/", "") in written)
    )
    return ControlTokens(frozenset(control), ROLES.union(filter(str.isidentifier, words)))


def is_control(text: str) -> bool:
    """Return False for added tokens that any text has: single characters and white space."""
    return len(text) > 1 and not text.isspace()


def spelled(rendered: str) -> str:
    """Return the prompt of a rendered conversation, without the marks in it."""
    parts = _WRITTEN_MARK.split(rendered)
    if len(parts) == 1:
        return rendered
    return SpelledPrompt("".join(parts), accumulate(map(len, parts[:-1])))


class _Pattern:
    """Finds texts, and strings whose end or beginning is a part of one.

    Templates join strings: of two content parts, the first may end in `<|im_` and the second begin
    with `end|>`.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        texts = frozenset(wanted)
        self.longest = max(map(len, texts), default=0)
        self.whole = re.compile(one_of(texts))
        self.first = frozenset(text[0] for text in texts)
        self.last = frozenset(text[-1] for text in texts)
        self.heads = frozenset(text[:n] for text in texts for n in range(1, len(text)))
        self.tails = frozenset(text[n:] for text in texts for n in range(1, len(text)))
        first, last = _characters(self.first), _characters(self.last)
        inner = _characters(char for text in texts for char in text[1:-1])
        inner = f"{inner}{{0,{4 * self.longest}}}"
        # Of JSON: a text, or what may be the beginning or the end of one beside a quotation mark.
        # Three patterns, because an alternative that begins with a class slows the search down.
        rough = (one_of(map(_in_json, texts)), f'{first}{inner}"', f'"{inner}{last}')
        self.rough = tuple(re.compile(pattern.encode()) for pattern in rough)

    def mark(self, text: str) -> str:
        """Return `text` with a mark inside of each text, and where one may go on outside."""
        end, begin = text[-self.longest :], text[: self.longest]
        sizes = range(1, self.longest)
        ends = not self.first.isdisjoint(end) and any(end[-n:] in self.heads for n in sizes)
        begins = not self.last.isdisjoint(begin) and any(begin[:n] in self.tails for n in sizes)
        inside = self.whole.sub(lambda match: match[0][0] + _MARK + match[0][1:], text)
        return f"{_MARK * begins}{inside}{_MARK * ends}"


def _marked(value: Any, tokens: _Pattern) -> Any:
    if isinstance(value, str):
        return tokens.mark(_FOREIGN.sub("\ufffd", value))
    if isinstance(value, dict):
        return {_marked(key, tokens): _marked(item, tokens) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, tokens) for item in value]
    return value


def one_of(texts: Iterable[str]) -> str:
    """Return a pattern of the longest of `texts`, whose common beginnings are compared once."""
    endings: dict[str, list[str]] = {}
    for text in texts:
        if text:
            endings.setdefault(text[0], []).append(text[1:])
    if not endings:
        return "(?!)"
    branches = []
    for first, rest in sorted(endings.items()):
        ends = "" in rest
        more = one_of(rest) if any(rest) else ""
        branches.append(re.escape(first) + (f"(?:{more})?" if ends and more else more))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _characters(chars: Iterable[str]) -> str:
    """Return a pattern of the UTF-8 bytes of characters in JSON; it never matches for none."""
    encoded = {byte for char in chars for byte in _in_json(char).encode()}
    return "[" + "".join(rf"\x{byte:02x}" for byte in sorted(encoded)) + "]" if encoded else "(?!)"


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PlainTextEncoder:
    """A tokenizer that knows another one's control tokens by aliases alone.

    An alias is as long as its token and begins with a noncharacter, which no prompt has. The
    control tokens of the template are replaced by their aliases, and the rest of the prompt is
    encoded as by a tokenizer without control tokens, in one piece: merges at the seams, offsets and
    the spaces that added tokens take in are those of that tokenizer.
    """

    def __init__(self, backend: Tokenizer, added: Mapping[int, AddedToken]) -> None:
        """Share the model of `backend`; `added` are its added tokens by id."""
        self._plain = Tokenizer(backend.model)
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        self._plain.post_processor = backend.post_processor
        self._aliases: dict[str, str] = {}
        self._ids: dict[int, int] = {}
        endings = Counter[str]()
        for number, token in added.items():
            text, ending = token.content, token.content[1:]
            if is_control(text) and endings[ending] < len(NONCHARACTERS):
                self._aliases[text] = text = chr(NONCHARACTERS[endings[ending]]) + ending
                endings[ending] += 1
            flags = ("lstrip", "rstrip", "single_word", "normalized")
            copied = AddedToken(text, **{name: getattr(token, name) for name in flags})
            self._plain.add_tokens([copied])
            if (own_id := self._plain.token_to_id(text)) is not None:
                self._ids[own_id] = number
        # Pieces of the model's own vocabulary, which some models make of such a text.
        self._control = frozenset(map(self._plain.token_to_id, self._aliases))
        self._found = re.compile(one_of(self._aliases))

    def encode(
        self, prompt: SpelledPrompt, max_length: int | None, side: str, *, adds_special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids, at most `max_length`, and the offsets of their characters.

        `side` is the end at which a longer prompt is cut.
        """
        marks = prompt.marks

        def alias(match: re.Match[str]) -> str:
            index = bisect_right(marks, match.start())
            is_text = index < len(marks) and marks[index] < match.end()
            return match[0] if is_text else self._aliases[match[0]]

        text = self._found.sub(alias, str(prompt))
        encoding = self._plain.encode(text, add_special_tokens=False)
        if not self._control.isdisjoint(encoding.ids):
            cuts = pairwise((0, *marks, len(text)))
            parts = [self._plain.encode(text[a:b], add_special_tokens=False) for a, b in cuts]
            encoding = Encoding.merge(parts, growing_offsets=True)
        if max_length is not None:
            around = self._plain.num_special_tokens_to_add(is_pair=False) if adds_special else 0
            encoding.truncate(max(max_length - around, 0), direction=side)
        if adds_special:
            encoding = self._plain.post_process(encoding)
        return [self._ids.get(number, number) for number in encoding.ids], encoding.offsets


logger = logging.getLogger(__name__)

MARK = b"RENDER\n"
"""The prefix of rendering jobs; jobs about bodies begin with the name of an endpoint."""

_OF_TEMPLATES = (
    TemplateError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""The exceptions of templates, raised explicitly or by an unexpected conversation."""

_QUOTES = "\nRendered chat:\n"
_NOT_CONTINUED = (
    "The last message cannot be continued: the chat template leaves it out or changes its text."
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """Everything a chat template needs; `arguments` are those of `apply_chat_template`.

    `control_tokens` are those that the texts of the conversation must not become.
    """

    conversation: list[Any]
    arguments: dict[str, Any]
    special_tokens: dict[str, str]
    control_tokens: ControlTokens | None = None

    def run(self, apply: Callable[..., Any]) -> Any:
        """Return the prompt that `apply` makes: transformers' `apply_chat_template`."""
        template = {"chat_template": self.arguments["chat_template"]}
        variables = {k: v for k, v in self.arguments.items() if k not in template}
        conversation, tokens = self.conversation, self.control_tokens
        marked = tokens is not None and tokens.may_occur(conversation, variables)
        if tokens is not None and marked:
            conversation, variables = tokens.mark(conversation, variables)
        try:
            prompt = apply(conversation, **template, **variables)
        except (TemplateError, ValueError) as error:
            # transformers quotes the whole prompt, with the template's own instructions.
            quotes = _QUOTES in str(error)
            if not quotes and not marked:
                raise
            reason = _NOT_CONTINUED if quotes else str(spelled(str(error)))
            raise TemplateError(reason) from None
        return spelled(prompt) if marked else prompt

    def as_job(self) -> bytes:
        return MARK + pickle.dumps(self, pickle.HIGHEST_PROTOCOL)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, or the template's error."""

    prompt: str = ""
    reason: str | None = None


def render(job: bytes) -> Rendered:
    """Render a job's conversation by its template. Raises `MemoryError`."""
    rendering: Rendering = pickle.loads(job[len(MARK) :])  # noqa: S301 (written by `as_job`)
    tokenizer = _template_tokenizer()(rendering.special_tokens)
    try:
        prompt = rendering.run(tokenizer.apply_chat_template)
    except RecursionError:
        return Rendered(reason="its macros call themselves too often.")
    except _OF_TEMPLATES as error:
        return Rendered(reason=str(error))
    return Rendered(prompt)


@cache
def _template_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerBase

    class TemplateTokenizer(PreTrainedTokenizerBase):
        """A tokenizer without a vocabulary, which is all that a template needs of one."""

        chat_template = None

        def __init__(self, special_tokens: dict[str, str]) -> None:
            """Initialise nothing else: the base class would look for a vocabulary."""
            self.__dict__["_given_tokens"] = special_tokens

        @property
        def special_tokens_map(self) -> dict[str, str]:
            return dict(self.__dict__["_given_tokens"])

    return TemplateTokenizer


SMALL_MESSAGES = 160
"""Fewer messages, of a small body, are rendered within milliseconds by most templates."""

TokensOf = Callable[[str], ControlTokens]
Send = Callable[[bytes], Coroutine[Any, Any, Rendered]]
"""Sends a job to another process."""

large_var: ContextVar[bool] = ContextVar("large", default=False)
"""True if the body of the current request was too large for parsing on the event loop."""

_thread = threading.local()
"""Its `is_large` is true in threads that render conversations of large bodies."""


class RemoteTemplates:
    """Renders small conversations in place and others in another process; blocks meanwhile."""

    def __init__(
        self,
        send: Send,
        served: Collection[str],
        max_chars: int,
        get_tokens: TokensOf | None = None,
    ) -> None:
        """Use from the event loop.

        `served` are the templates of the served model. `get_tokens` returns the control tokens of a
        template that texts must not become.
        """
        self._send = send
        self._in_place = frozenset(filter(is_bounded, served))
        self._all_in_place = len(self._in_place) == len(served)
        self._max_chars = max_chars
        self._tokens_of = get_tokens
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def waits(self, template: str | None) -> bool:
        """Return True if a small conversation may be rendered in another process.

        `template` None is one of those that are served.
        """
        return not self._all_in_place if template is None else template not in self._in_place

    def apply(
        self, here: Callable[..., Any], tokens: dict[str, str], conversation: Any, **arguments: Any
    ) -> Any:
        """Return the prompt. Raises `TemplateError`, `ContextLengthError` or what `send` raises."""
        template = arguments.get("chat_template")
        small = not getattr(_thread, "is_large", False) and len(conversation) <= SMALL_MESSAGES
        # The loop's own thread must not wait for the loop; it renders the warm-up alone.
        if arguments.get("tokenize", True) or threading.get_ident() == self._loop_thread:
            prompt = here(conversation, **arguments)
        else:
            control = None if self._tokens_of is None else self._tokens_of(template or "")
            rendering = Rendering(conversation, arguments, tokens, control)
            if small and template in self._in_place:
                prompt = rendering.run(here)
            else:
                sent = self._send(rendering.as_job())
                done = asyncio.run_coroutine_threadsafe(sent, self._loop).result()
                if done.reason is not None:
                    raise TemplateError(done.reason)
                prompt = done.prompt
        if isinstance(prompt, str) and len(prompt) > self._max_chars:
            raise ContextLengthError(
                f"The chat template makes {len(prompt)} characters of the conversation; at most "
                f"{self._max_chars} can be tokenized."
            )
        return prompt


def sanitizer(online: OnlineRenderer) -> tuple[TokensOf | None, PlainTextEncoder | None]:
    """Return what keeps texts from becoming control tokens; None for a tokenizer without them.

    Tokenizers that are not of the `tokenizers` library are left as they are, with a warning.
    """
    tokenizer: Any = online.renderer.tokenizer
    added: Any = getattr(tokenizer, "added_tokens_decoder", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        if added:
            logger.warning("control tokens in texts are not sanitized: the tokenizer is not fast")
        return None, None
    named = ""
    if online.parser is not None and online.parser.reasoning_parser_cls is not None:
        options: dict[str, Any] = {"chat_template_kwargs": {}, "model_config": online.model_config}
        parser = online.parser.reasoning_parser_cls(tokenizer, **options)
        named = f"{parser.reasoning_start_str}\0{parser.reasoning_end_str}"

    @lru_cache(maxsize=_CACHED)
    def get_tokens(template: str) -> ControlTokens:
        return get_control_tokens(template, added.values(), named)

    return get_tokens, PlainTextEncoder(backend, added)


def render_elsewhere(
    renderer: Any, templates: RemoteTemplates, workers: int, encoder: PlainTextEncoder | None
) -> None:
    """Make vLLM's renderer send large conversations to another process.

    `encoder` tokenizes the prompts of marked conversations. A tokenizer with an
    `apply_chat_template` of its own stays as it is.
    """
    from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
    from vllm.utils.async_utils import make_async

    tokenizer = renderer.tokenizer
    if not isinstance(renderer, HfRenderer) or not _has_plain_templates(tokenizer):
        return
    small = renderer._apply_chat_template_async
    threads = ThreadPoolExecutor(
        workers, "large-templates", lambda: setattr(_thread, "is_large", True)
    )
    large = make_async(safe_apply_chat_template, executor=threads)

    async def apply(*args: Any, **kwargs: Any) -> Any:
        # Of those rendered elsewhere, so many are waited for that the others have a thread.
        waits = large_var.get() or templates.waits(kwargs.get("chat_template"))
        return await (large if waits else small)(*args, **kwargs)

    class RemoteTemplateTokenizer(type(tokenizer)):  # type: ignore[misc]
        """Mixin for the tokenizer's class, as vLLM's own pool of tokenizers."""

        def apply_chat_template(self, conversation: Any, **arguments: Any) -> Any:
            here = super().apply_chat_template
            return templates.apply(here, self.special_tokens_map, conversation, **arguments)

        def __call__(self, text: Any = None, *args: Any, **arguments: Any) -> Any:
            if encoder is None or not isinstance(text, SpelledPrompt):
                return super().__call__(text, *args, **arguments)
            ids, offsets = encoder.encode(
                text,
                arguments.get("max_length") if arguments.get("truncation") else None,
                arguments.get("truncation_side") or self.truncation_side,
                adds_special=arguments.get("add_special_tokens", True),
            )
            return {"input_ids": ids, "offset_mapping": offsets}

    use_template_renderer(renderer, RemoteTemplateTokenizer, apply)


def _has_plain_templates(tokenizer: Any) -> bool:
    """Return True if transformers' own method renders the templates."""
    from transformers import PreTrainedTokenizerBase
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    classes = (
        kind
        for kind in type(tokenizer).__mro__
        if "apply_chat_template" in vars(kind) and not issubclass(kind, ThreadSafeHFTokenizerMixin)
    )
    return next(classes, None) is PreTrainedTokenizerBase
