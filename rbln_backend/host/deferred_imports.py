"""Imports that are deferred, or followed by a call, within a block.

Deferred modules give references instead of running.

`from module import name` needs the module at once, so `importlib.util.LazyLoader` saves nothing
there. Here it gives a reference, which imports the module when the name is first called, read,
subscribed, tested with `isinstance` or made the base of a class. Invariant: after the block no
deferred module is in `sys.modules`, so that later import statements get the real one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Union


class DeferredName:
    """Reference to a name of a module that is imported when the name is first used."""

    __slots__ = ("_module", "_name")

    def __init__(self, module: str, name: str) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_name", name)

    def _is_of(self, modules: Collection[str]) -> bool:
        return self._module in modules

    def _resolve(self) -> Any:
        """Return the object; raises `ImportError` if the module has no such name."""
        module = _import(self._module)
        try:
            return getattr(module, self._name)
        except AttributeError:
            # `from package import module` imports the module, which may be no attribute yet.
            place = f"{self._module}.{self._name}"
            if hasattr(module, "__path__") and find_spec(place) is not None:
                return _import(place)
            text = f"cannot import name {self._name!r} from {self._module!r}"
            raise ImportError(text) from None

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._resolve()(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # `typing` looks for its hooks in everything that is part of an annotation.
            raise AttributeError(name)
        return getattr(self._resolve(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._resolve(), name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._resolve()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._resolve()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._resolve())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._resolve(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._resolve())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._resolve())

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        return f"<deferred {self._module}.{self._name}>"


class DeferredModule(ModuleType):
    """Placeholder of a module that has not run; its names are references."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return DeferredName(self.__name__, name)


class _NotRun(Loader):
    """Makes a `DeferredModule` and runs nothing."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""


class _Deferring(MetaPathFinder):
    """Finds the deferred modules."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = set(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = _found(name, path, target) if name in self.names else None
        if spec is not None:
            spec.loader = _NotRun()
        return spec


class _Followed(Loader):
    """Loads a module as `loader` does and calls `action` with it."""

    def __init__(self, loader: Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)


class _Following(MetaPathFinder):
    """Finds one module, whose import an action follows."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = _found(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self._action)
        return spec


@contextmanager
def followed_import(name: str, action: Callable[[ModuleType], None]) -> Iterator[None]:
    """Call ``action`` with module ``name`` right after it ran, if the block imports it."""
    finder = _Following(name, action)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def deferred_imports(names: Collection[str]) -> Iterator[None]:
    """Defer imports of the modules `names` in the block; those imported before stay as they are."""
    finder = _Deferring(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in names:
            _forget(name)


def import_deferred(names: Collection[str]) -> None:
    """Import the modules `names`, and put their names in place of references in all modules.

    For modules that are needed later in the block: what is imported then gets the real names.
    """
    for name in names:
        _import(name)
    for module in list(sys.modules.values()):
        # Reading an attribute may import something; reading the dictionary does not.
        space = getattr(module, "__dict__", {})
        for key, value in list(space.items()):
            if type(value) is DeferredName and value._is_of(names):
                space[key] = value._resolve()


def _found(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """Return what the finders find that are not ours, which would ask each other in turn."""
    for finder in sys.meta_path:
        if isinstance(finder, _Deferring | _Following):
            continue
        if (spec := finder.find_spec(name, path, target)) is not None:
            return spec
    return None


def _import(name: str) -> ModuleType:
    """Import the real module; in a block neither its parents nor its submodules are deferred."""
    parts = name.split(".")
    parents = {".".join(parts[:end]) for end in range(1, len(parts))}
    for finder in [found for found in sys.meta_path if isinstance(found, _Deferring)]:
        family = {n for n in finder.names if n in parents or n == name or n.startswith(f"{name}.")}
        finder.names -= family
    # Other threads import meanwhile; the copy of the keys is one step.
    for module in [*parents, *(n for n in list(sys.modules) if f"{n}.".startswith(f"{name}."))]:
        _forget(module)
    return importlib.import_module(name)


def _forget(name: str) -> None:
    """Remove the placeholder of a module."""
    if not isinstance(sys.modules.get(name), DeferredModule):
        return
    del sys.modules[name]
    if _children(name):
        # The import system made them attributes of the placeholder, and will not do so again.
        sys.meta_path.insert(0, _Following(name, _bind_children))


def _children(name: str) -> dict[str, ModuleType]:
    """Return the imported modules right below a package, by their own names."""
    found = [(full.rpartition("."), module) for full, module in list(sys.modules.items())]
    return {own: module for (parent, _, own), module in found if parent == name}


def _bind_children(package: ModuleType) -> None:
    for own, module in _children(package.__name__).items():
        package.__dict__.setdefault(own, module)
