"""Names of vLLM that the sources use, read from their syntax trees without importing them.

A name starts with its module: `vllm.v1.core.sched.scheduler.Scheduler.schedule`. Types are
inferred from annotations, constructor calls and plain assignments.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("server", "rbln_backend")
_UPSTREAM = "vllm"
_MODULE_PATH = re.compile(r"vllm(\.\w+)+")
# Names of entry points, which are no modules.
_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
# vLLM's executors call methods of workers by name, and the base class lacks some.
_SIBLINGS = {"vllm.v1.worker.worker_base.WorkerBase": "vllm.v1.worker.gpu_worker.Worker"}


@dataclass
class Uses:
    """Uses of vLLM by kind."""

    names: set[str] = field(default_factory=set)
    """Names that are imported or written as a string; they must exist."""
    members: set[str] = field(default_factory=set)
    """Members reached through them; of our subclasses, possibly their own."""
    replaced: set[str] = field(default_factory=set)
    """Members that are assigned from outside."""
    steered: set[str] = field(default_factory=set)
    """Members that our subclasses assign to `self` and vLLM's methods may read."""
    overrides: dict[tuple[str, str], inspect.Signature] = field(default_factory=dict)
    """Our signature by (possible method of vLLM, our class)."""


@dataclass
class _Class:
    """A class of ours."""

    bases: list[str]
    attributes: dict[str, str] = field(default_factory=dict)
    """Known types of its instances' attributes."""


@dataclass
class _Module:
    """A module of ours, with the full names of its bound names."""

    tree: ast.Module
    name: str
    bound: dict[str, str] = field(default_factory=dict)


def find_uses(root: Path) -> Uses:
    """Return the uses of the packages under `root`."""
    return _Finder(
        [_read(path, root) for package in PACKAGES for path in _files(root / package)]
    ).found


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _read(path: Path, root: Path) -> _Module:
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    module = _Module(ast.parse(path.read_text(encoding="utf-8")), name)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module.bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                module.bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ClassDef):
            module.bound[node.name] = f"{name}.{node.name}"
    return module


class _Finder:
    def __init__(self, modules: list[_Module]) -> None:
        self.found = Uses()
        self._modules = {module.name: module for module in modules}
        self._classes: dict[str, _Class] = {}
        for module in modules:
            self._note_classes(module)
        for module in modules:
            self._note_names(module)
        # Each round uses the attribute types that the previous one found.
        known = -1
        while known != (known := self._round(modules)):
            pass

    def _round(self, modules: list[_Module]) -> int:
        """Visit all modules; return the number of known types and members."""
        for module in modules:
            _Scope(self, module, "", {}).visit(module.tree)
        types = sum(len(known.attributes) for known in self._classes.values())
        return types + len(self.found.members)

    def _note_classes(self, module: _Module) -> None:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                bases = [self.meaning(_written(base), module) for base in node.bases]
                self._classes[f"{module.name}.{node.name}"] = _Class(bases)

    def meaning(self, written: str, module: _Module) -> str:
        """Return the full name of a dotted expression, resolved through imports."""
        first, _, rest = written.partition(".")
        if first not in module.bound:
            return ""
        target = self.origin(module.bound[first])
        return f"{target}.{rest}" if rest else target

    def origin(self, name: str) -> str:
        """Return the name at its definition, through our modules that only import it."""
        owner, _, last = name.rpartition(".")
        bound = self._modules[owner].bound if owner in self._modules else {}
        return self.origin(bound[last]) if bound.get(last, name) != name else name

    def upstream_bases(self, name: str) -> Iterator[str]:
        """Yield the base classes of ours that are vLLM's."""
        for base in self._classes[name].bases:
            if base in self._classes:
                yield from self.upstream_bases(base)
            elif _is_upstream(base):
                yield base

    def attribute(self, class_name: str, name: str) -> str:
        """Return the type of an attribute of our class, or an empty text."""
        known = self._classes[class_name]
        for base in (b for b in known.bases if b in self._classes):
            if inherited := self.attribute(base, name):
                return inherited
        return known.attributes.get(name, "")

    def learn(self, class_name: str, name: str, type_name: str) -> None:
        """Record the type of an attribute of our class."""
        if type_name:
            self._classes[class_name].attributes[name] = type_name

    def is_ours(self, name: str) -> bool:
        """Return True if `name` is a class of ours."""
        return name in self._classes

    def _note_names(self, module: _Module) -> None:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and _is_upstream(node.module or ""):
                self.found.names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                self.found.names.update(a.name for a in node.names if _is_upstream(a.name))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _MODULE_PATH.fullmatch(node.value) and node.value not in _GROUPS:
                    self.found.names.add(node.value)
            elif isinstance(node, ast.ClassDef):
                self._visit_class(f"{module.name}.{node.name}", node)

    def _visit_class(self, name: str, node: ast.ClassDef) -> None:
        bases = set(self.upstream_bases(name))
        bases |= {_SIBLINGS[base] for base in bases if base in _SIBLINGS}
        for base in bases:
            for item in node.body:
                self.found.members.update(f"{base}.{defined}" for defined in _defined(item))
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    override = f"{base}.{item.name}", node.name
                    self.found.overrides[override] = signature(item)


class _Scope(ast.NodeVisitor):
    """Visitor of one function, or of module level, with the types of its names."""

    def __init__(
        self, finder: _Finder, module: _Module, class_name: str, types: dict[str, str]
    ) -> None:
        self._finder = finder
        self._module = module
        self._class = class_name
        self._types = types

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        inner = _Scope(self._finder, self._module, f"{self._module.name}.{node.name}", {})
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                self._finder.learn(inner._class, item.target.id, self._annotated(item.annotation))
            inner.visit(item)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        types = dict(self._types)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            types[argument.arg] = self._annotated(argument.annotation)
        if self._class and arguments and arguments[0].arg in ("self", "cls"):
            types[arguments[0].arg] = self._class
        inner = _Scope(self._finder, self._module, self._class, types)
        for statement in node.body:
            inner.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._types[alias.asname or alias.name] = self._finder.origin(
                f"{node.module}.{alias.name}"
            )

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        self._assign(node.target, None)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            annotated = self._annotated(node.annotation)
            known = self._finder.is_ours(annotated) or _is_upstream(annotated)
            self._types[node.target.id] = annotated if known else self._type(node.value)
        elif self._is_own(node.target):
            assert isinstance(node.target, ast.Attribute)
            self._finder.learn(self._class, node.target.attr, self._annotated(node.annotation))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self._type(node.value)
        if _is_upstream(owner):
            self._finder.found.members.add(f"{owner}.{node.attr}")
        elif self._finder.is_ours(owner):
            for base in self._finder.upstream_bases(owner):
                self._finder.found.members.add(f"{base}.{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        made = self._type(node)
        if _is_upstream(made) and _written(node.func) != "super":
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            self._finder.found.members.update(f"{made}.{n}" for n in ("__init__", *keywords))
        match node:
            case ast.Call(ast.Name("setattr"), [owner, ast.Constant(str(name)), _]):
                self._replace(ast.Attribute(owner, name))
            case ast.Call(ast.Name("getattr"), [owner, ast.Constant(str(name)), *_]):
                self.visit_Attribute(ast.Attribute(owner, name))
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.generic_visit(node)
        test = node.test
        if isinstance(test, ast.Call) and _written(test.func) == "isinstance":
            tested, kind = test.args
            if isinstance(tested, ast.Name):
                self._types[tested.id] = self._annotated(kind)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple):
            values: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                values = [*value.elts]
            # A tuple of another length has starred parts, whose types are not known.
            for one, given in zip(target.elts, values, strict=True):
                self._assign(one, given)
        elif isinstance(target, ast.Name):
            self._types[target.id] = self._type(value) if value is not None else ""
        elif self._is_own(target):
            assert isinstance(target, ast.Attribute)
            bases = self._finder.upstream_bases(self._class)
            self._finder.found.steered.update(f"{base}.{target.attr}" for base in bases)
            known = self._finder.attribute(self._class, target.attr)
            self._finder.learn(self._class, target.attr, known or self._type(value))
        else:
            self._replace(target)

    def _replace(self, target: ast.expr) -> None:
        row = target
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            row = target.value
        if not isinstance(row, ast.Attribute):
            return
        owner = self._type(row.value)
        if _is_upstream(owner) or self._is_torch(row.value):
            self._finder.found.replaced.add(f"{owner}.{row.attr}")

    def _is_own(self, target: ast.expr) -> bool:
        """Return True for an attribute of `self`."""
        return (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
            and bool(self._class)
        )

    def _is_torch(self, owner: ast.expr) -> bool:
        return self._module.bound.get(_written(owner).partition(".")[0]) == "torch"

    def _annotated(self, annotation: ast.expr | None) -> str:
        """Return the first class of vLLM or ours that an annotation names."""
        if isinstance(annotation, ast.BinOp):
            return self._annotated(annotation.left) or self._annotated(annotation.right)
        written = _written(annotation)
        return self._finder.meaning(written, self._module) if written else ""

    def _type(self, value: ast.expr | None) -> str:
        """Return the type or the full name of an expression, or an empty text."""
        if isinstance(value, ast.Name):
            if value.id in self._types:
                return self._types[value.id]
            return self._finder.meaning(value.id, self._module)
        if isinstance(value, ast.Attribute):
            return self._member(self._type(value.value), value.attr)
        if isinstance(value, ast.Call):
            return self._result(value)
        return ""

    def _member(self, owner: str, name: str) -> str:
        if self._finder.is_ours(owner):
            known = self._finder.attribute(owner, name)
            bases = list(self._finder.upstream_bases(owner))
            return known or (f"{bases[0]}.{name}" if bases else "")
        return f"{owner}.{name}" if owner else ""

    def _result(self, call: ast.Call) -> str:
        """Return the type that a constructor, or a class method named `from_…`, makes."""
        if _written(call.func) == "super":
            return next(iter(self._finder.upstream_bases(self._class)), "")
        made = self._type(call.func)
        owner, _, method = made.rpartition(".")
        if method.startswith("from_"):
            return self._type(call.func.value) if isinstance(call.func, ast.Attribute) else owner
        return made if made.rpartition(".")[2][:1].isupper() else ""


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """Return a function's signature without annotations; every default is `...`."""
    arguments = node.args
    kinds = inspect.Parameter
    made: list[inspect.Parameter] = []
    first = len(arguments.posonlyargs)
    positional = [*arguments.posonlyargs, *arguments.args]
    for index, argument in enumerate(positional):
        kind = kinds.POSITIONAL_ONLY if index < first else kinds.POSITIONAL_OR_KEYWORD
        optional = index >= len(positional) - len(arguments.defaults)
        made.append(kinds(argument.arg, kind, default=... if optional else kinds.empty))
    if arguments.vararg:
        made.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        given = kinds.empty if default is None else ...
        made.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=given))
    if arguments.kwarg:
        made.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)


def _defined(item: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a class body defines."""
    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
        yield item.name
    elif isinstance(item, ast.Assign):
        yield from (target.id for target in item.targets if isinstance(target, ast.Name))
    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
        yield item.target.id


def _written(node: ast.expr | None) -> str:
    """Return a dotted expression as written, without subscripts and calls."""
    if isinstance(node, ast.Subscript):
        return _written(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _written(node.value)):
        return f"{owner}.{node.attr}"
    if isinstance(node, ast.Call):
        return _written(node.func)
    return ""


def _is_upstream(name: str) -> bool:
    return f"{name}.".startswith(f"{_UPSTREAM}.")
