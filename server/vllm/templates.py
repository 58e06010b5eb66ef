"""What the code of a chat template says: its variables, and whether its time is bounded.

A template is bounded if it renders a small conversation within milliseconds. Nested loops multiply,
except over what the loop around them yields: those visit each part of the conversation once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.errors import InvalidValueError
from server.request.options import TemplateVariables

if TYPE_CHECKING:
    from vllm.renderers.online_renderer import OnlineRenderer


_GLOBALS = frozenset((*DEFAULT_NAMESPACE, "raise_exception", "strftime_now", "messages"))
"""Names that transformers gives every template."""
_SPECIAL_TOKENS = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
"""Transformers' variable names of special tokens, for every tokenizer."""
_DOCUMENTS = "documents"
"""An argument of the tokenizer that only sets the variable of that name."""
_WITHOUT_TEMPLATE = frozenset(("thinking", "enable_thinking", "drop_thinking", "reasoning_effort"))
"""Variables read by vLLM's encoders of models without a chat template, such as DeepSeek-V3.2."""
_CACHED_TEMPLATES = 32


def template_variables(online: OnlineRenderer) -> TemplateVariables:
    """Return the variables that requests may set in the templates behind vLLM's renderer."""
    from vllm.renderers.hf import HfRenderer

    renderer: Any = online.renderer
    tokenizer = renderer.tokenizer
    if tokenizer is None:
        return TemplateVariables()
    arguments = _arguments(tokenizer)
    if not isinstance(renderer, HfRenderer):
        return TemplateVariables(chat=_WITHOUT_TEMPLATE, arguments=arguments)
    chat = frozenset[str]().union(*map(_declared_or_none, get_templates(online)))
    score = frozenset() if online.chat_template is None else _declared_or_none(online.chat_template)
    return TemplateVariables(chat=chat - arguments, score=score - arguments, arguments=arguments)


@lru_cache(maxsize=_CACHED_TEMPLATES)
def declared_by(template: str) -> frozenset[str]:
    """Return the variables of a request's own template. Raises `InvalidValueError`."""
    try:
        return _declared(template)
    except TemplateError as error:
        raise InvalidValueError(
            f"'chat_template' is not a Jinja template: {error}.", param="chat_template"
        ) from None


def get_templates(online: OnlineRenderer) -> set[str]:
    """Return the templates that vLLM chooses from: with and without tools."""
    from vllm.renderers.hf import HfRenderer, resolve_chat_template

    renderer: Any = online.renderer
    if not isinstance(renderer, HfRenderer) or renderer.tokenizer is None:
        return set()
    choices: tuple[list[Any] | None, ...] = (None, [])
    given, config = online.chat_template, online.model_config
    chosen = (
        resolve_chat_template(renderer.tokenizer, given, tools, model_config=config)
        for tools in choices
    )
    return {template for template in chosen if template is not None}


def _declared_or_none(template: str) -> frozenset[str]:
    """Return the variables of the served template; none if it cannot be parsed."""
    try:
        return _declared(template)
    except TemplateError:
        return frozenset()


def _declared(template: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(parsed(template)))


@lru_cache(maxsize=_CACHED_TEMPLATES)
def parsed(template: str) -> nodes.Template:
    """Return the syntax tree of a chat template. Raises `TemplateError`."""
    from vllm.renderers.hf import AssistantTracker

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[AssistantTracker, loopcontrols]
    )
    return environment.parse(template)


def _arguments(tokenizer: Any) -> frozenset[str]:
    """Return the names that templates do not declare: arguments, globals and special tokens."""
    from transformers import PythonBackend
    from vllm.renderers.hf import safe_apply_chat_template

    functions = (
        PythonBackend.apply_chat_template,
        tokenizer.apply_chat_template,
        safe_apply_chat_template,
    )
    names = {name for function in functions for name in inspect.signature(function).parameters}
    special = {*getattr(tokenizer, "special_tokens_map", ()), *_SPECIAL_TOKENS}
    return frozenset(names | _GLOBALS | special) - {_DOCUMENTS}


_LISTS = frozenset(("messages", "tools", "documents"))
"""Variables with few items in a small conversation; a text has thousands of characters."""
_LIST_FILTERS = frozenset(("list", "select", "reject", "selectattr", "rejectattr", "reverse"))
_FUNCTIONS = frozenset(("raise_exception", "strftime_now", "namespace", "dict"))
"""Functions whose own time does not depend on their arguments."""
_MAX_COUNT = 100
_MAX_STEPS = 20_000
"""Nodes visited, macros for each call, until a template counts as unbounded."""


@lru_cache(maxsize=32)
def is_bounded(template: str) -> bool:
    """Return True if loops multiply at most once, by a list of the conversation's."""
    try:
        tree = parsed(template)
        _Visitor(tree).visit(tree.body, 0, {}, ())
    except TemplateError:
        return True  # It is not rendered.
    except (_UnboundedError, RecursionError):
        return False
    return True


class _UnboundedError(Exception):
    """A construct whose number of steps is not bounded here."""


class _Visitor:
    """Walks through a template as it runs.

    `depth` is the number of loops around that multiply. `origins` has the loop from which each
    variable comes, by its number; 0 is outside of all loops.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        self._lists = _list_variables(tree)
        self._loops = 0
        self._steps = 0

    def visit(
        self,
        parts: Iterable[nodes.Node],
        depth: int,
        origins: dict[str, int],
        macros: tuple[str, ...],
    ) -> None:
        """Visit nodes within the calls of `macros`. Raises `_UnboundedError`."""
        for node in parts:
            self._steps += 1
            if self._steps > _MAX_STEPS or isinstance(
                node, nodes.Include | nodes.Import | nodes.FromImport | nodes.Extends
            ):
                raise _UnboundedError
            if isinstance(node, nodes.Macro):
                continue
            if isinstance(node, nodes.For):
                self._visit_loop(node, depth, origins, macros)
                continue
            if isinstance(node, nodes.If):
                self._visit_branches(node, depth, origins, macros)
                continue
            if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
                self._visit_call(node, node.node.name, depth, origins, macros)
            elif isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.Name):
                raise _UnboundedError
            elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
                origins[node.target.name] = self._origin(node.node, origins)
            self.visit(node.iter_child_nodes(), depth, origins, macros)

    def _visit_loop(
        self, node: nodes.For, depth: int, origins: dict[str, int], macros: tuple[str, ...]
    ) -> None:
        self.visit([node.iter], depth, origins, macros)
        counts = _is_range(node.iter)
        if node.recursive:
            raise _UnboundedError
        inner = depth
        if not depth or self._origin(node.iter, origins) < self._loops:
            inner += 1
            if inner > 2 or (inner == 2 and not counts and not _is_list(node.iter, self._lists)):
                raise _UnboundedError
        self._loops += 1
        targets = [node.target, *node.target.find_all(nodes.Name)]
        bound = {name.name: self._loops for name in targets if isinstance(name, nodes.Name)}
        test = [] if node.test is None else [node.test]
        self.visit([*test, *node.body], inner, {**origins, **bound}, macros)
        self._loops -= 1
        self.visit(node.else_, depth, origins, macros)

    def _visit_branches(
        self, node: nodes.If, depth: int, origins: dict[str, int], macros: tuple[str, ...]
    ) -> None:
        self.visit([node.test], depth, origins, macros)
        after = [dict(origins) for _ in range(3)]
        branches: list[list[nodes.Node]] = [node.body, [*node.elif_], node.else_]
        for branch, known in zip(branches, after, strict=True):
            self.visit(branch, depth, known, macros)
        for name in {name for known in after for name in known}:
            origins[name] = min(known.get(name, 0) for known in after)

    def _visit_call(
        self,
        node: nodes.Call,
        name: str,
        depth: int,
        origins: dict[str, int],
        macros: tuple[str, ...],
    ) -> None:
        macro = self._macros.get(name)
        is_small_range = _is_range(node) and all(map(self._is_count, node.args))
        if macro is None and (name in _FUNCTIONS or is_small_range):
            return
        if macro is None or name in macros:
            raise _UnboundedError
        values = dict(zip((arg.name for arg in macro.args), node.args, strict=False))
        values |= {keyword.key: keyword.value for keyword in node.kwargs}
        bound = {key: self._origin(value, origins) for key, value in values.items()}
        self.visit([*macro.defaults, *macro.body], depth, bound, (*macros, name))

    def _origin(self, node: nodes.Node | None, origins: dict[str, int]) -> int:
        """Return the innermost loop whose item the whole value is a part of."""
        if isinstance(node, nodes.Name):
            return origins.get(node.name, 0)
        if isinstance(node, nodes.Getattr | nodes.Getitem | nodes.Filter):
            return self._origin(node.node, origins)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            return self._origin(node.node, origins)
        if isinstance(node, nodes.CondExpr):
            return min(self._origin(part, origins) for part in (node.expr1, node.expr2))
        if isinstance(node, nodes.Or | nodes.Add):
            return min(self._origin(part, origins) for part in (node.left, node.right))
        # An empty list or text, as in `message.tool_calls or []`.
        empty = (isinstance(node, nodes.List) and not node.items) or (
            isinstance(node, nodes.Const) and not node.value
        )
        return self._loops if empty else 0

    def _is_count(self, node: nodes.Node) -> bool:
        """Return True for a number that is small, or the length of a list or an index in it."""
        if isinstance(node, nodes.Const):
            return isinstance(node.value, int) and abs(node.value) <= _MAX_COUNT
        if isinstance(node, nodes.Filter):
            return node.name in ("length", "count") and _is_list(node.node, self._lists)
        if isinstance(node, nodes.Getattr):
            return isinstance(node.node, nodes.Name) and node.node.name == "loop"
        return isinstance(node, nodes.Add | nodes.Sub | nodes.Neg | nodes.Pos) and all(
            map(self._is_count, node.iter_child_nodes())
        )


def _is_range(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Call)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "range"
    )


def _is_list(node: nodes.Node | None, lists: frozenset[str]) -> bool:
    """Return True for one of `lists` or a part of it that has whole items."""
    if isinstance(node, nodes.Name):
        return node.name in lists
    if isinstance(node, nodes.Filter):
        return node.name in _LIST_FILTERS and _is_list(node.node, lists)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Slice) and _is_list(node.node, lists)
    if isinstance(node, nodes.CondExpr):
        return _is_list(node.expr1, lists) and _is_list(node.expr2, lists)
    return isinstance(node, nodes.List | nodes.Tuple)


def _list_variables(tree: nodes.Template) -> frozenset[str]:
    """Return the variables that are assigned such lists alone."""
    assigned = [
        (node.target.name, node.node)
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and node.target.name not in _LISTS
    ]
    lists = _LISTS | {name for name, _ in assigned}
    while wrong := lists & {name for name, value in assigned if not _is_list(value, lists)}:
        lists -= wrong
    return lists
