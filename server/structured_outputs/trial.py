"""The process that checks and tries constraints; the server goes on if it hangs or is killed.

Hostile input may take the checks of size and syntax long, so that they run here too, never on the
event loop. Schemas of structural tags go to xgrammar: one that passes `check_exact`, which was
found by experiment, and of which the compiler does not warn, is followed exactly. Check it again
with every new xgrammar.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rbln_backend import api
from server import bounds
from server.errors import clip, json_type
from server.host.job_pool import limit_growth, limit_processor_time, uncounted_processor_time
from server.structured_outputs.constraint import Constraint, ConstraintKind, UnusableError
from server.structured_outputs.grammars import (
    MARK,
    Grammar,
    SchemaRules,
    choice_grammar,
    regex_grammar,
    schema_grammar,
    tag_grammar,
)
from server.structured_outputs.normaliser import normalised
from server.structured_outputs.schema_document import Schema, every_schema, resolve

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_size(schema: Any) -> None:
    """Raise `UnusableError` if a schema or structural tag exceeds a limit."""
    stack: list[tuple[Any, int]] = [(schema, 1)]
    nodes = 0
    while stack:
        value, depth = stack.pop()
        nodes += 1
        if nodes > bounds.SCHEMA_MAX_NODES:
            raise UnusableError(
                f"it has more than {bounds.SCHEMA_MAX_NODES} objects, arrays and values, the "
                "limit of this server"
            )
        if not isinstance(value, dict | list):
            continue
        if depth > bounds.SCHEMA_MAX_DEPTH:
            raise UnusableError(
                f"it is nested deeper than {bounds.SCHEMA_MAX_DEPTH} levels, the limit of this "
                "server"
            )
        if isinstance(value, dict):
            enum, named = value.get("enum"), value.get("patternProperties")
            if isinstance(enum, list) and len(enum) > bounds.SCHEMA_MAX_ENUM:
                raise UnusableError(
                    f"an enum has {len(enum)} values; the limit of this server is "
                    f"{bounds.SCHEMA_MAX_ENUM}"
                )
            if isinstance(pattern := value.get("pattern"), str):
                check_pattern_length(pattern, "a pattern")
            for pattern in named if isinstance(named, dict) else ():
                check_pattern_length(pattern, "a pattern of patternProperties")
            value = list(value.values())
        stack += [(item, depth + 1) for item in value]


def check_pattern_length(pattern: str, what: str) -> None:
    """Raise `UnusableError` if a regular expression is too long."""
    if len(pattern) > bounds.SCHEMA_MAX_PATTERN:
        raise UnusableError(
            f"{what} has {len(pattern)} characters; the limit of this server is "
            f"{bounds.SCHEMA_MAX_PATTERN}"
        )


_ABSENT = tuple(
    "not if then else dependentRequired dependentSchemas dependencies $dynamicRef $recursiveRef "
    "minContains maxContains".split()
)
_FORMATS = frozenset(
    "email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template "
    "json-pointer relative-json-pointer".split()
)
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": tuple(
        "items prefixItems minItems maxItems uniqueItems contains unevaluatedItems".split()
    ),
    "object": tuple(
        "properties patternProperties additionalProperties propertyNames required minProperties "
        "maxProperties unevaluatedProperties".split()
    ),
}
_ASSERTIONS = frozenset(("type", "enum", "const")).union(*_OF_TYPE.values())
_BRANCHES = ("anyOf", "oneOf", "allOf")


def check_exact(root: Any) -> None:
    """Raise `UnusableError` for the first part of a schema that the grammar would not follow."""
    if isinstance(root, bool):
        return
    for path, schema in every_schema(root):
        if (found := next((key for key in _ABSENT if key in schema), None)) is not None:
            raise UnusableError(f"{path}: the keyword '{found}' is not supported")
        for rule in (_combined, _listed, _untyped, _simple, _object):
            if (reason := rule(root, path, schema)) is not None:
                raise UnusableError(f"{path}: {reason}")


def _combined(root: Any, path: str, schema: Schema) -> str | None:
    """Refuse keywords beside a reference or a combination: the grammar ignores them."""
    chosen = [key for key in ("$ref", *_BRANCHES) if key in schema]
    if not chosen:
        return None
    if len(chosen) > 1:
        return f"'{chosen[0]}' and '{chosen[1]}' cannot be combined"
    others = sorted(_ASSERTIONS & schema.keys())
    if (
        others == ["type"]
        and chosen[0] != "$ref"
        and all(_has_type(root, path, item, schema["type"]) for item in schema[chosen[0]])
    ):
        return None
    return f"'{others[0]}' cannot stand beside '{chosen[0]}'" if others else None


def _has_type(root: Any, path: str, schema: Any, kind: Any) -> bool:
    """Return True if a branch has the type itself; follows one reference."""
    if isinstance(schema, dict) and "$ref" in schema:
        schema = resolve(root, schema["$ref"], path)
    if not isinstance(schema, dict):
        return False
    own = schema.get("type", "object" if "properties" in schema else None)
    return own is not None and own == kind


def _listed(_root: Any, _path: str, schema: Schema) -> str | None:
    """Refuse values of `enum` and `const` that fail the keywords beside them."""
    beside = {key: schema[key] for key in _ASSERTIONS & schema.keys() - {"enum", "const"}}
    if "enum" in schema and "const" in schema:
        return "'enum' and 'const' cannot be combined"
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values and beside:
        from jsonschema import Draft202012Validator

        validator = Draft202012Validator(beside)
        bad = next((value for value in values if not validator.is_valid(value)), None)
        if bad is not None or (None in values and not validator.is_valid(None)):
            return f"the value {bad!r} of 'enum' or 'const' fails the keywords beside it"
    return None


def _untyped(_root: Any, _path: str, schema: Schema) -> str | None:
    """Refuse keywords of one type without `type`: the grammar ignores them."""
    if {"type", "enum", "const", "$ref", *_BRANCHES} & schema.keys() or "properties" in schema:
        return None
    found = next((key for keys in _OF_TYPE.values() for key in keys if key in schema), None)
    return None if found is None else f"'{found}' needs a 'type' beside it"


def _simple(_root: Any, _path: str, schema: Schema) -> str | None:
    """Refuse keywords of numbers, strings and arrays that the grammar does not follow."""
    types = schema.get("type")
    if "multipleOf" in schema and (types == "number" or isinstance(types, list)):
        return "'multipleOf' is supported for the type 'integer' alone"
    asserted = schema.get("format") in _FORMATS
    has_length = "minLength" in schema or "maxLength" in schema
    if has_length and ("pattern" in schema or asserted):
        return "'minLength' and 'maxLength' cannot stand beside 'pattern' or 'format'"
    if "pattern" in schema and asserted:
        return "'pattern' cannot stand beside 'format'"
    if schema.get("uniqueItems") is True and schema.get("maxItems", 2) > 1:
        return "'uniqueItems' is not supported"
    if "contains" in schema:
        return "the keyword 'contains' is not supported"
    return None


def _object(_root: Any, _path: str, schema: Schema) -> str | None:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in properties:
            return f"the required property {name!r} is not in 'properties'"
    patterns = schema.get("patternProperties", {})
    if patterns and (properties or len(patterns) > 1):
        return "'patternProperties' takes one pattern, without 'properties' beside it"
    closed = schema.get("additionalProperties") is False
    names = "propertyNames" in schema
    if names and (properties or patterns or isinstance(schema.get("additionalProperties"), dict)):
        return "'propertyNames' cannot stand beside other keywords for properties"
    # The grammar may repeat a name that the schema does not list.
    listed_only = closed or (properties and schema.get("additionalProperties") is None)
    fewest = schema.get("minProperties", 0)
    if fewest > len(schema.get("required", ())) and not (listed_only and not patterns):
        return "'minProperties' needs that many required properties, or no others than listed"
    return None


_MAX_DIGITS = 400
"""Characters of an integer; Python refuses to format thousands of digits."""


def inspect(constraint: Constraint) -> Any:
    """Return the value of a schema or of a tag; None for other constraints.

    Raises `UnusableError` if the constraint is too large, malformed or not supported.
    """
    text = constraint.text
    if constraint.kind is ConstraintKind.REGEX:
        if not text:
            raise UnusableError("it is empty")
        if "\0" in text:
            raise UnusableError("it has a NUL character")
        check_pattern_length(text, "it")
    elif constraint.kind is ConstraintKind.GRAMMAR:
        if not text.strip():
            raise UnusableError("it is empty")
        if not text.startswith(MARK):
            _check_escapes(text)
    elif constraint.kind is ConstraintKind.CHOICE:
        choices = json.loads(text)
        if not choices:
            raise UnusableError("it has no values")
        if len(choices) > bounds.SCHEMA_MAX_ENUM:
            raise UnusableError(
                f"it has {len(choices)} values; the limit of this server is "
                f"{bounds.SCHEMA_MAX_ENUM}"
            )
    elif constraint.kind is ConstraintKind.JSON:
        schema = parsed(text)
        _check_schema(schema)
        return schema
    else:
        tag = parsed(text)
        if not isinstance(tag, dict):
            raise UnusableError(f"it must be an object, got {json_type(tag)}")
        check_size(tag)
        for schema in _schemas_of_tag(tag):
            _check_schema(schema)
        return tag
    return None


def check_unrewritten(constraint: Constraint) -> None:
    """Raise `UnusableError` for a schema that xgrammar does not take.

    What an exact constraint has must be followed.
    """
    if constraint.kind is ConstraintKind.JSON:
        schemas = [parsed(constraint.text)]
    elif constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        schemas = list(_schemas_of_tag(parsed(constraint.text)))
    else:
        return
    for schema in schemas:
        # Refuses malformed schemas, and those that refer to themselves.
        normalised(schema, closed=False)
        if constraint.exact:
            check_exact(schema)


def parsed(text: str) -> Any:
    """Return the JSON value of `text`. Raises `UnusableError`."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite, parse_int=_short)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnusableError("it has half of a surrogate pair, which UTF-8 cannot hold") from None
    except ValueError as error:
        raise UnusableError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise UnusableError("it is nested too deeply to be read") from None
    return value


def _short(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer has more than {_MAX_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is beyond what a double holds")
    return value


_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
"""An escape of EBNF, with its code point."""


def _check_escapes(grammar: str) -> None:
    """Raise `UnusableError` for an escape of EBNF that UTF-8 cannot hold."""
    for found in _ESCAPE.finditer(grammar):
        code = int(found[found.lastindex], 16) if found.lastindex else 0
        if code in range(0xD800, 0xE000) or code > sys.maxunicode:
            raise UnusableError(
                f"the escape '{found[0][:20]}' at character {found.start() + 1} is half of a "
                "surrogate pair or no character"
            )


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise UnusableError(f"it must be an object, got {json_type(schema)}")
    check_size(schema)


def _schemas_of_tag(tag: Any) -> Iterator[Any]:
    """Yield the JSON schemas in a structural tag of either form.

    Raises `UnusableError` for a regex or a grammar that is read differently.
    """
    stack = [tag]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            if value.get("type") == "json_schema" and "json_schema" in value:
                yield value["json_schema"]
            elif {"begin", "schema", "end"} <= value.keys():
                yield value["schema"]
            elif value.get("type") == "regex" and isinstance(value.get("pattern"), str):
                regex_grammar(value["pattern"])
            elif value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
                _check_escapes(value["grammar"])
            else:
                stack += value.values()


Trial = Callable[[str, str], list[str]]
"""Tries one grammar of a kind and returns warnings.

Raises ValueError or RuntimeError, or TimeoutError if its masks were too slow.
"""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """Result of a trial; `reason` is None if the constraints can be used.

    `part` is the index of the constraint that cannot be used, `seconds` the time of the trial.
    `grammar` replaces a schema that was tried alone. `memory_bytes` is the most that a grammar
    took. `measured`: the reason is a timing, so that another trial may end differently.
    """

    reason: str | None = None
    part: int = 0
    seconds: float | None = None
    grammar: str | None = None
    measured: bool = False
    memory_bytes: int | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> TrialVerdict:
        return cls(**json.loads(data))


def job_bytes(constraints: Sequence[Constraint]) -> bytes:
    parts = [(c.kind.value, c.text, c.exact, c.derived, c.tagged) for c in constraints]
    return json.dumps({"shares": get_shares(constraints), "parts": parts}).encode()


def get_shares(constraints: Sequence[Constraint]) -> int:
    """Return how many times the processor time of one constraint a job may take."""
    return max(constraint.shares for constraint in constraints)


def do_job(
    data: bytes,
    trial: Trial,
    rules: SchemaRules,
    *,
    specials: Mapping[str, int] | None = None,
    on_shares: Callable[[int], None] | None = None,
) -> TrialVerdict:
    """Inspect and try the constraints of a job, up to the first that cannot be used.

    `specials` are the tokenizer's special tokens (see `tag_grammar`). `on_shares` is called with
    the job's shares first.
    """
    job = json.loads(data)
    if on_shares is not None:
        on_shares(job["shares"])
    started = time.perf_counter()
    grammar = None
    for part, (kind, text, exact, derived, tagged) in enumerate(job["parts"]):
        constraint = Constraint(ConstraintKind(kind), text, "", exact, derived, tagged)
        try:
            found = _grammar(constraint, specials or {}, rules)
            if found is None:
                grammar = None
                if not derived:
                    check_unrewritten(constraint)
                _try(constraint, kind, text, trial)
            else:
                if found.left_out and exact:
                    raise UnusableError(found.left_out[0])
                grammar = found.text
                _try(constraint, ConstraintKind.GRAMMAR.value, grammar, trial)
        except UnusableError as error:
            return TrialVerdict(str(error), part, time.perf_counter() - started)
        except TimeoutError as error:
            return TrialVerdict(str(error), part, time.perf_counter() - started, measured=True)
    return TrialVerdict(seconds=time.perf_counter() - started, grammar=grammar)


def _grammar(
    constraint: Constraint, specials: Mapping[str, int], rules: SchemaRules
) -> Grammar | None:
    """Inspect a constraint and return its grammar; None if it is tried as it is."""
    if not constraint.derived:
        value = inspect(constraint)
    elif constraint.kind in (ConstraintKind.JSON, ConstraintKind.STRUCTURAL_TAG):
        value = parsed(constraint.text)
    else:
        value = None
    if constraint.kind is ConstraintKind.REGEX:
        return regex_grammar(constraint.text)
    if constraint.kind is ConstraintKind.CHOICE:
        return choice_grammar(json.loads(constraint.text))
    if value is None or constraint.tagged:
        return None
    if constraint.kind is ConstraintKind.JSON:
        return schema_grammar(value, rules)
    return tag_grammar(value, specials, rules)


def _try(constraint: Constraint, kind: str, text: str, trial: Trial) -> None:
    try:
        warnings = trial(kind, text)
    except (TypeError, KeyError):
        raise UnusableError("a part of it is missing or has a wrong type") from None
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UnusableError(_plain(str(error)) or type(error).__name__) from None
    ignored = [
        line for line in warnings if "warning" in line.lower() and not _HARMLESS.search(line)
    ]
    if ignored and constraint.exact:
        raise UnusableError(_plain(ignored[0]))


# An unnecessary backslash.
_HARMLESS = re.compile(r"matching the character literally|The character itself will be matched")
_PLACE = re.compile(r"^(\[[\d:]+\] )?\S*\.(cc|h):\d+: ")
_CHECK = re.compile(r"^Check failed: \(.*\) is false: ")
_COMPILING = re.compile(r"(?:failed to compile JSON schema|^error): ([^\n]*)", re.MULTILINE)
"""llguidance's message has the whole grammar around this line."""
_MAX_REASON = 300


def _plain(message: str) -> str:
    """Return a native message without its place in source code or grammar."""
    if found := _COMPILING.search(message):
        message = found[1]
    text = _PLACE.sub("", " ".join(message.split())).removeprefix("Warning: ").rstrip(". ")
    return clip(_CHECK.sub("", text), _MAX_REASON)


_NICENESS = 5


def serve_trials(
    pipe: Connection, vllm_config: VllmConfig, cpu_s: float, rules: SchemaRules
) -> None:
    """Answer jobs until the pipe closes; the first message is `ready`.

    The process ends at a job that takes more than `cpu_s` of processor time per share.
    """
    import setproctitle

    setproctitle.setproctitle("rbln-serve: grammar trials")
    os.nice(_NICENESS)
    trial = api.grammar_trial(vllm_config, uncounted_processor_time)
    limit_growth()
    specials = trial.special_tokens()
    # Collections of cycles, which take a tenth of a job, wait until its answer is sent.
    gc.freeze()
    gc.disable()
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            job = pipe.recv_bytes()
            limit_processor_time(cpu_s)
            verdict = do_job(
                job,
                trial,
                rules,
                specials=specials,
                on_shares=lambda shares: limit_processor_time(cpu_s * shares),
            )
            limit_processor_time(0)
            verdict = replace(verdict, memory_bytes=trial.take_bytes())
            pipe.send_bytes(verdict.to_bytes())
            gc.collect()
