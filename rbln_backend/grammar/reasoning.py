"""Where the reasoning of an answer begins and ends: one reading for whole answers and streams.

vLLM's parsers read whole answers, streams and prompts by three rules, and look for the markers of
reasoning in all of a conversation. Here the end of the rendered prompt alone decides how an answer
begins. Its text is then read from left to right, in pieces of any size: the markers that begin and
end its reasoning are dropped, and all others are text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.reasoning import ReasoningParser
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning.deepseek_v3_reasoning_parser import DeepSeekV3ReasoningParser
from vllm.reasoning.ernie45_reasoning_parser import Ernie45ReasoningParser
from vllm.reasoning.gemma4_engine_reasoning_parser import Gemma4ParserReasoningAdapter
from vllm.reasoning.granite_reasoning_parser import GraniteReasoningParser
from vllm.reasoning.hunyuan_a13b_reasoning_parser import HunyuanA13BReasoningParser
from vllm.reasoning.hy_v4_reasoning_parser import HYV4ReasoningParser
from vllm.reasoning.k2_horizon_reasoning_parser import K2HorizonReasoningParser
from vllm.reasoning.minimax_m2_reasoning_parser import MiniMaxM2AppendThinkReasoningParser
from vllm.reasoning.olmo3_reasoning_parser import Olmo3ReasoningParser
from vllm.reasoning.step3_reasoning_parser import Step3ReasoningParser

_BY_MARKS = (
    BaseThinkingReasoningParser,
    DeepSeekV3ReasoningParser,
    GraniteReasoningParser,
    HunyuanA13BReasoningParser,
    HYV4ReasoningParser,
    MiniMaxM2AppendThinkReasoningParser,
    Olmo3ReasoningParser,
    ParserEngineReasoningAdapter,
    Step3ReasoningParser,
)


_OTHERS = ("Mistral", "Inkling")
"""Engines whose end marker ends other blocks, too, or whose grammars have the reasoning."""


def goes_by_marks(parser: type[ReasoningParser]) -> bool:
    """Return whether a parser's reasoning is what stands between two texts."""
    engine = getattr(parser, "_parser_engine_cls", None)
    other = engine is not None and engine.__name__.startswith(_OTHERS)
    return issubclass(parser, _BY_MARKS) and not other


def own_marks(parser: ReasoningParser) -> dict[str, Any] | None:
    """Return the fields of the markers that a parser has in its code; None for most."""
    if isinstance(parser, GraniteReasoningParser):
        starts, ends = parser.valid_think_starts, parser.valid_response_starts
        return {"starts": tuple(starts), "ends": tuple(ends)}
    if isinstance(parser, HunyuanA13BReasoningParser):
        frame = ("<answer>\n", "\n</answer>")
        return {"starts": ("<think>\n",), "ends": ("\n</think>\n",), "frame": frame}
    if isinstance(parser, Gemma4ParserReasoningAdapter):
        start, end = parser.reasoning_start_str, parser.reasoning_end_str
        return {"starts": (f"{start}thought\n", start), "ends": (end,), "calls": call_marks(parser)}
    if isinstance(parser, MiniMaxM2AppendThinkReasoningParser):
        return {"starts": ("<think>",), "ends": ("</think>",), "shown": True}
    if isinstance(parser, Ernie45ReasoningParser):
        frame = (parser.response_start_token, parser.response_end_token)
        return {"starts": (parser.start_token,), "ends": (parser.end_token,), "frame": frame}
    return None


def call_marks(parser: ReasoningParser) -> tuple[str, ...]:
    """Return the texts that end reasoning because a tool call begins."""
    if isinstance(parser, K2HorizonReasoningParser):
        return (parser._TOOL_CALLS_START,)
    if not isinstance(parser, ParserEngineReasoningAdapter):
        return ()
    config = parser._parser_engine.parser_engine_config
    found = (
        config.terminals[terminal]
        for (state, terminal), step in config.transitions.items()
        if state is ParserState.REASONING
        and step.next_state is not ParserState.REASONING
        and terminal != "THINK_END"
    )
    return tuple(
        text for value in found for text in ((value,) if isinstance(value, str) else value)
    )


_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch thinking."""
_HEAD = re.compile(r"\s*(?:\w+\n)?\s*")
"""What stands between the last control token of a prompt and the text of its last message."""
_TAIL = 64
"""Tokens at the end of a prompt that are read for markers."""
_PROBE = "x \n\n"


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts around the reasoning of an answer.

    `starts`, the longest first, and `ends` are dropped. `calls` begin a tool call, end the
    reasoning and stay. `frame` may be around the text of the answer. `trim` cuts the end of the
    reasoning. `shown`: reasoning is part of the answer, with its markers.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    calls: tuple[str, ...] = ()
    frame: tuple[str, str] | None = None
    trim: Callable[[str], str] = str
    shown: bool = False


class Reader:
    """Reads the text of one answer; `begin`, `end` and `rest` are places in it.

    The reasoning is from `begin` to `end`, the answer begins at `rest`.
    """

    def __init__(self, marks: Marks, *, thinks: bool, may_start: bool) -> None:
        """`thinks`: the reasoning has begun. `may_start`: the text may begin with its marker."""
        self.thinks = thinks
        self.begin = self.end = self.rest = 0
        self._marks = marks
        self._may_start = may_start
        self._held = ""
        self._framed: bool | None = None if marks.frame else False

    @property
    def answers(self) -> bool:
        """True if all that follows is the answer."""
        return not (self.thinks or self._may_start)

    def read(self, text: str, *, finished: bool) -> tuple[str, str]:
        """Return the reasoning and the answer that are known after one more piece of the text."""
        self._held += text
        reasoning = ""
        if self._may_start and not self._has_begun(finished=finished):
            return "", ""
        if self.thinks:
            reasoning = self._think(finished=finished)
        return reasoning, "" if self.thinks else self._answer(finished=finished)

    def _has_begun(self, *, finished: bool) -> bool:
        """Drop a marker at the beginning; False if the text may still become one."""
        text = self._held.lstrip()
        longer = (mark for mark in self._marks.starts if mark != text)
        if not finished and any(mark.startswith(text) for mark in longer):
            return False
        found = next((mark for mark in self._marks.starts if text.startswith(mark)), None)
        if found is not None:
            self.begin = self.end = self.rest = len(self._held) - len(text) + len(found)
            self._held, self.thinks = text[len(found) :], True
        self._may_start = False
        return True

    def _think(self, *, finished: bool) -> str:
        marks, text = self._marks, self._held
        found = [(at, mark) for mark in (*marks.ends, *marks.calls) if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            said, self.thinks = marks.trim(text[:at]), False
            behind = at if mark in marks.calls else at + len(mark)
            self.end, self.rest = self.end + at, self.end + behind
            self._held = text[behind:]
            return said
        known = len(text) if finished else len(text) - _begun(text, (*marks.ends, *marks.calls))
        said = marks.trim(text[:known])
        cut = len(text) if finished else len(said)
        self._held = text[cut:]
        self.end += cut
        self.rest = self.end
        return said

    def _answer(self, *, finished: bool) -> str:
        text, self._held = self._held, ""
        if self._marks.frame is None or self._framed is False:
            return text
        opening, closing = self._marks.frame
        if self._framed is None:
            begun = text.lstrip()
            if not begun.startswith(opening):
                if opening.startswith(begun) and not finished:
                    self._held = text
                    return ""
                self._framed = False
                return text
            self._framed, text = True, begun[len(opening) :]
        at = text.rfind(closing)
        if at < 0 or text[at + len(closing) :].strip():
            at = len(text) - _begun(text, (closing,)) if not finished else len(text)
        if not finished:
            self._held = text[at:]
        return text[:at]


def _begun(text: str, marks: Iterable[str]) -> int:
    """Return the number of characters at the end of a text that may become a marker."""
    sizes = (
        size
        for mark in marks
        for size in range(min(len(mark) - 1, len(text)), 0, -1)
        if text.endswith(mark[:size])
    )
    return max(sizes, default=0)


class Reading:
    """The reading of one answer by its texts and tokens, which may be some texts ahead."""

    def __init__(
        self, parser: MarkedReasoning, prompt_ids: Sequence[int], *, hidden: bool, forced: bool
    ) -> None:
        """`hidden`: special tokens are not in the text. `forced`: the answer may not be empty."""
        self._parser, self._prompt_ids = parser, prompt_ids
        self._reader = parser.reader(prompt_ids)
        self._hidden = parser.special_marks if hidden else {}
        self._shows = parser.marks.shown and self._reader.thinks
        self._said: list[str] | None = [] if forced else None
        self._ids: list[int] = []
        self._marks_at: list[tuple[int, str]] = []
        self._length = 0
        self.tokens = 0
        """Number of tokens of the reasoning."""

    def read(
        self, text: str, ids: Sequence[int], *, finished: bool
    ) -> tuple[str, str, Sequence[int]]:
        """Return the reasoning, the answer and the answer's tokens of one more piece."""
        if self._parser.marks.shown:
            text, self._shows = self._parser.marks.starts[0] * self._shows + text, False
            return "", text, ids
        answers = self._reader.answers
        if answers:
            reasoning, answer = self._reader.read(text, finished=finished)
        else:
            self._note(ids)
            reasoning, answer = self._reader.read(self._with_marks(text), finished=finished)
            ids = []
            if self._reader.answers or finished:
                self.tokens, rest = self._parser.span(self._ids, self._prompt_ids)
                ids = self._ids[rest:]
            elif self._reader.thinks:
                self.tokens = len(self._ids) - (self._reader.begin > 0)
        if self._said is not None:
            self._said.append(reasoning)
            if answer.strip():
                self._said = None
            elif finished:
                answer = "".join(self._said)
        return reasoning, answer, ids

    def thinks_behind(self, text: str, ids: Sequence[int]) -> bool:
        """Return whether the answer is in its reasoning if it ends with this piece."""
        end = copy(self)
        end._reader, end._said = copy(self._reader), None
        end._ids, end._marks_at = [*self._ids], [*self._marks_at]
        end.read(text, ids, finished=True)
        return end._reader.thinks and not self._parser.marks.shown

    def _note(self, ids: Sequence[int]) -> None:
        """Note the tokens, and where in the text there are markers that it does not show."""
        for token in ids:
            if token in self._hidden:
                place = self._parser.length(self._ids, self._prompt_ids)
                self._marks_at.append((place, self._hidden[token]))
            self._ids.append(token)

    def _with_marks(self, text: str) -> str:
        shown = ""
        while self._marks_at and self._marks_at[0][0] <= self._length + len(text):
            place, mark = self._marks_at.pop(0)
            at = max(place - self._length, 0)
            shown, text = shown + text[:at] + mark, text[at:]
            self._length += at
        self._length += len(text)
        return shown + text


class MarkedReasoning(ReasoningParser):
    """Reads the reasoning of a model whose parser in vLLM is `given`, by that parser's markers."""

    given: ClassVar[type[ReasoningParser]]
    # The reader takes pieces of any size.
    engine_based_streaming = True

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        options = dict(kwargs.get("chat_template_kwargs") or {})
        switches = [options[name] for name in _SWITCHES if options.get(name) is not None]
        off = bool(switches) and not any(switches)
        self._continues = bool(options.get("continue_final_message"))
        self._given = self.given(tokenizer, *args, **{**kwargs, "chat_template_kwargs": options})
        marks = _marks(self._given)
        # What the parser makes of an answer without a marker, and of one with both.
        asked: Any = None
        by_default = self._given.extract_reasoning("x", asked)[0]
        self._thinks_by_default = marks.shown or (bool(by_default) and not off)
        # Thinking is on, and the model begins it itself.
        waits = self._given.engine_based_streaming and not self._given.is_reasoning_end([])
        self._waits = waits and not off
        self._may_start = False
        if marks.starts and not marks.shown:
            opening = marks.frame[0] if marks.frame else ""
            text = f"{marks.starts[0]}{_PROBE}{marks.ends[0]}{opening}y"
            said = self._given.extract_reasoning(text, asked)[0]
            self._may_start = bool(said)
            marks = replace(marks, trim=_trim(said or _PROBE))
        self.marks = marks

    @property
    def special_marks(self) -> dict[int, str]:
        """Markers that are special tokens, by id; one of a call stands for an end."""
        decode, marks = self.model_tokenizer.decode, self.marks
        texts = {mark: end for mark in marks.calls for end in marks.ends[:1]}
        texts |= {mark: mark for mark in (*marks.starts, *marks.ends)}
        found = {self.vocab.get(mark): text for mark, text in texts.items()}
        return {
            token: text
            for token, text in found.items()
            if token is not None and not decode([token], skip_special_tokens=True)
        }

    def reader(self, prompt_ids: Sequence[int]) -> Reader:
        """Return a reader of the answer to a rendered prompt."""
        starts, ends = self.marks.starts, self.marks.ends
        thinks, may_start = self._thinks_by_default, self._may_start
        if not starts:
            thinks = may_start = False
        elif self._continues:
            thinks, may_start = self._is_begun(self._last_message(prompt_ids)), False
        else:
            tail = self.text(prompt_ids[-_TAIL:]).rstrip()
            if tail.endswith(tuple(mark.rstrip() for mark in ends)):
                thinks = may_start = False
            elif tail.endswith(tuple(mark.rstrip() for mark in starts)):
                thinks = may_start = True
            else:
                may_start = may_start or thinks
        return Reader(self.marks, thinks=thinks, may_start=may_start)

    def reading(self, prompt_ids: Sequence[int], request: Any) -> Reading:
        """Return a reading of the answer to vLLM's request with a rendered prompt."""
        engine = getattr(self._given, "_parser_engine", None)
        forces = getattr(engine, "_should_force_content", None)
        forced = forces is not None and bool(forces(request))
        return Reading(self, prompt_ids, hidden=request.skip_special_tokens, forced=forced)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the answer to a rendered prompt begins without reasoning."""
        reader = self.reader(input_ids)
        return reader.answers or not (reader.thinks or self._waits)

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """Return whether reasoning ends in the last tokens, `delta_ids`, of `input_ids`."""
        new, marks = list(delta_ids), (*self.marks.ends, *self.marks.calls)
        reach = max(map(len, marks), default=0)
        before = list(input_ids[max(len(input_ids) - len(new) - reach, 0) : len(input_ids)])
        before = before[: len(before) - len(new)]
        text = self.text([*before, *new])
        if not any(mark in text for mark in marks):
            return False
        known = len(self.text(before))
        return any(text.find(mark, max(known - len(mark) + 1, 0)) >= 0 for mark in marks)

    def span(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Return the number of tokens of an answer's reasoning, and where its answer begins."""
        reader = self.reader(prompt_ids)
        if self.marks.shown or reader.answers:
            return 0, 0
        if ids and ids[-1] == self.model_tokenizer.eos_token_id:
            ids = ids[:-1]
        reader.read(self.text(ids), finished=True)
        begin = next(at for at in range(len(ids) + 1) if self._reaches(ids, at, reader.begin))
        if reader.thinks:
            return len(ids) - begin, len(ids)
        # Mostly a token is the marker; to look for its place otherwise takes a dozen decodes.
        tokens = (self.vocab.get(mark) for mark in self.marks.ends)
        at = next((ids.index(token) for token in tokens if token in ids), 0)
        if len(self.text(ids[:at])) != reader.end:
            at = bisect_left(range(len(ids)), True, key=lambda k: self._reaches(ids, k, reader.end))
        rest = next(k for k in range(at, len(ids) + 1) if self._reaches(ids, k, reader.rest))
        return at - begin, rest

    def length(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
        """Return the number of characters of an answer without special tokens."""
        # Decoders of some tokenizers strip the beginning of a text.
        before = list(prompt_ids[-4:])
        both = self.model_tokenizer.decode([*before, *ids], skip_special_tokens=True)
        return len(both) - len(self.model_tokenizer.decode(before, skip_special_tokens=True))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.model_tokenizer.decode(list(ids), skip_special_tokens=False))

    def _reaches(self, ids: Sequence[int], count: int, chars: int) -> bool:
        """Return whether the first tokens of an answer have as many characters."""
        return chars <= 0 or len(self.text(ids[:count])) >= chars

    def _last_message(self, ids: Sequence[int]) -> str:
        """Return the text behind the last added token that is no part of a marker."""
        marks = (*self.marks.starts, *self.marks.ends)
        added = {
            token
            for text, token in self.model_tokenizer.get_added_vocab().items()
            if not any(text in mark for mark in marks)
        }
        places = (at for at in range(len(ids), 0, -1) if ids[at - 1] in added)
        return self.text(ids[next(places, 0) :])

    def _is_begun(self, message: str) -> bool:
        """Return whether a message that is continued begins with reasoning that is open."""
        for mark in self.marks.starts:
            head, found, said = message.partition(mark)
            if found and _HEAD.fullmatch(head):
                return not any(end in said for end in (*self.marks.ends, *self.marks.calls))
        return False


@cache
def marked_reasoning(given: type[ReasoningParser] | None) -> type[ReasoningParser] | None:
    """Return the class that reads by the markers of vLLM's parser; `given` where it has none."""
    if given is None or not goes_by_marks(given):
        return given
    return type(given.__name__, (MarkedReasoning,), {"given": given})


def _trim(said: str) -> Callable[[str], str]:
    """Return how a parser cuts the end of reasoning, by what it made of the probe."""
    if said.endswith(_PROBE):
        return str
    return str.rstrip if said.endswith(_PROBE.rstrip()) else _without_newline


def _without_newline(text: str) -> str:
    return text.removesuffix("\n")


def _marks(parser: ReasoningParser) -> Marks:
    """Return the markers of one of vLLM's parsers; none where it takes all for the answer."""
    if (own := own_marks(parser)) is not None:
        return Marks(**own)
    start, end = parser.reasoning_start_str, parser.reasoning_end_str
    if not start or not end:
        return Marks((), ())
    return Marks((start,), (end,), call_marks(parser))
