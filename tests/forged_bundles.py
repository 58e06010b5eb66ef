"""Bundles as an attacker would write them: real graphs with one thing changed, digests and all.

``python -m tests.forged_bundles ROOT [COUNT] [SEED]`` runs a long campaign over the graphs of a
cache root.
"""

import ast
import copy
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from rbln_backend.devices.rebel.modules import get_module
from rbln_backend.graphs.bundles import collect, write_archive
from rbln_backend.graphs.cache import (
    MANIFEST,
    CacheKey,
    encode_manifest,
    read_manifest,
    sources_digest,
)
from rbln_backend.graphs.call_list import CallList
from rbln_backend.graphs.program import Program
from server.commands.cache import GraphChecks
from server.commands.cli import main

CANARY = "forged-bundle-canary"
CODE = f"__import__('os').system('touch {CANARY}')"
_KEYWORDS = (
    f"**({CODE} and {{}} or {{}}))  #",
    f"x=({CODE})",
    "out",
    "self",
    "dim",
    "",
    "a b",
    "\n",
    "__class__",
    "é",
)
_OPERATORS = (
    *"torch.load torch.from_file torch.ops.load_library builtins.eval os.system".split(),
    *"method.apply_ method.numpy method.__class__ method.__reduce_ex__ method.set_".split(),
    *"op.aten::from_file.default op.aten::set_.source_Storage op.rbln_emulator::.default".split(),
    *"op.rbln_emulator::linear.__class__ op.rbln_channels::all_reduce.default getattr".split(),
    *"operator.attrgetter operator.methodcaller operator.call functional.__class__".split(),
    *"torch.empty torch.full torch.cat torch.arange method.view method.repeat".split(),
    *"method.new_empty method.expand operator.getitem operator.setitem method.to".split(),
    "op.rbln_emulator::linear.default",
    "op.rbln_emulator::self_attention.default",
    CODE,
    "placeholder",
    "output",
    "call_module",
    "get_attr",
    "",
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63 - 1,
    -(2**63),
    2**64,
    10**30,
    1.5,
    "",
    CODE,
    "cpu",
    "silu",
    "x" * 1000,
    [],
    [[]],
    [[[[[[1]]]]]],
    {},
    {"tuple": []},
    {"tuple": [1, [2]]},
    {"node": 0},
    {"node": -1},
    {"node": 10**9},
    {"node": True},
    {"node": "0"},
    {"node": 1.0},
    {"float": "0x1.0p+0"},
    {"float": "nan"},
    {"float": "1.5"},
    {"float": CODE},
    {"float": 1},
    {"dtype": "float32"},
    {"dtype": "nn"},
    {"dtype": "load"},
    {"dtype": []},
    {"dtype": CODE},
    {"device": "cpu"},
    {"device": "cuda:0"},
    {"device": "meta"},
    {"device": CODE},
    {"slice": [0, 1, None]},
    {"slice": [0]},
    {"slice": CODE},
    {"slice": [[], [], []]},
    {"ellipsis": True},
    {"ellipsis": False},
    {"memory_format": "contiguous_format"},
    {"memory_format": "nn"},
    {"code": CODE},
    {CODE: None},
    {"node": 0, "float": "0x0.0p+0"},
    [1] * 5000,
    {"tuple": [2**40, 2**40]},
    {"tuple": [65536, 65536]},
)
_NAMES = (CODE, "", "param:", "param:x\ny", "input:" + "x" * 5000, "file:/etc/passwd", "kv:é", 1)


def forge(chooser: random.Random, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return a bundle of ``files`` with one to three changes and every digest made to fit."""
    forged = dict(files)
    for _ in range(chooser.choice((1, 1, 1, 2, 3))):
        # An earlier change may have left nothing to change.
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            chooser.choice(_BUNDLE_CHANGES)(chooser, forged)
    return forged


def _change_program(chooser: random.Random, files: dict[str, bytes]) -> None:
    """One program, as JSON."""
    name = _choose(chooser, files, "program.json")
    document = json.loads(files[name])
    for _ in range(chooser.choice((1, 1, 2))):
        chooser.choice(_PROGRAM_CHANGES)(chooser, document)
    data = json.dumps(document, separators=chooser.choice(((",", ":"),) * 9 + ((", ", ": "),)))
    _replace(files, name, data.encode())


def _change_bytes(chooser: random.Random, files: dict[str, bytes]) -> None:
    """One program, as bytes."""
    name = _choose(chooser, files, "program.json")
    data = bytearray(files[name])
    for _ in range(chooser.randint(1, 4)):
        place = chooser.randrange(max(len(data), 1))
        data[place : place + chooser.randint(0, 3)] = chooser.randbytes(chooser.randint(0, 3))
    _replace(files, name, bytes(data))


def _change_key(chooser: random.Random, files: dict[str, bytes]) -> None:
    """The fields of a key: the entry then has another name, under which all is as it should be."""
    name = _choose(chooser, files, "program.json")
    fields = json.loads(files[_manifest_of(name)])["key"]
    fields[chooser.choice(sorted(fields))] = chooser.choice((CODE, 1, None, [], {"a": CODE}))
    _move(files, name, CacheKey(fields))


def _change_manifest(chooser: random.Random, files: dict[str, bytes]) -> None:
    name = _manifest_of(_choose(chooser, files, "program.json"))
    manifest = json.loads(files[name])
    place = chooser.choice(("format", "key", "files", "created", "checksum", "more"))
    manifest[place] = chooser.choice(
        (CODE, 10**400, None, [], {}, {"../../x": {"size": 1, "sha256": ""}}, -1, 1e308)
    )
    files[name] = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def _add_file(chooser: random.Random, files: dict[str, bytes]) -> None:
    name = _choose(chooser, files, "program.json")
    folder = name.rpartition("/")[0]
    new = chooser.choice(("x.py", "binaries.bin", "__init__.py", "sitecustomize.py", "x.so"))
    content = {"program.json": files[name], new: CODE.encode()}
    files[f"{folder}/{new}"] = content[new]
    key = CacheKey(json.loads(files[_manifest_of(name)])["key"])
    files[_manifest_of(name)] = encode_manifest(key, content, created=0)


def _add_path(chooser: random.Random, files: dict[str, bytes]) -> None:
    path = chooser.choice(
        ("rbln/x.py", "../x", "/tmp/x", "rbln/graphs/../../x", "rbln/usage/x.json", "x.pth")
    )
    files[path] = CODE.encode()


def _choose(chooser: random.Random, files: dict[str, bytes], ending: str) -> str:
    return chooser.choice(sorted(name for name in files if name.endswith(ending)))


def _manifest_of(program: str) -> str:
    return f"{program.rpartition('/')[0]}/{MANIFEST}"


def _replace(files: dict[str, bytes], name: str, data: bytes) -> None:
    key = CacheKey(json.loads(files[_manifest_of(name)])["key"])
    files[name] = data
    files[_manifest_of(name)] = encode_manifest(key, {"program.json": data}, created=0)


def _move(files: dict[str, bytes], name: str, key: CacheKey) -> None:
    data = files.pop(name)
    del files[_manifest_of(name)]
    folder = f"rbln/graphs/{key.digest[:2]}/{key.digest}"
    files[f"{folder}/program.json"] = data
    files[f"{folder}/{MANIFEST}"] = encode_manifest(key, {"program.json": data}, created=0)
    digests = sorted({path.split("/")[3] for path in files if path.startswith("rbln/graphs/")})
    listing = {**json.loads(files["rbln/bundle.json"]), "graphs": digests}
    files["rbln/bundle.json"] = (json.dumps(listing, indent=1, sort_keys=True) + "\n").encode()


_BUNDLE_CHANGES: tuple[Callable[[random.Random, dict[str, bytes]], None], ...] = (
    *(_change_program,) * 12,
    _change_bytes,
    _change_key,
    _change_manifest,
    _add_file,
    _add_path,
)


def _change_keyword(chooser: random.Random, document: Any) -> None:
    node = chooser.choice(document["nodes"])
    node.setdefault("kwargs", {})[chooser.choice(_KEYWORDS)] = _value(chooser)


def _change_operator(chooser: random.Random, document: Any) -> None:
    chooser.choice(document["nodes"])["op"] = chooser.choice(_OPERATORS)


def _change_argument(chooser: random.Random, document: Any) -> None:
    arguments = chooser.choice([n for n in document["nodes"] if "args" in n])["args"]["tuple"]
    arguments[chooser.randrange(len(arguments))] = _value(chooser)


def _change_count(chooser: random.Random, document: Any) -> None:
    arguments = chooser.choice([n for n in document["nodes"] if "args" in n])["args"]["tuple"]
    if chooser.random() < 0.5:
        del arguments[chooser.randrange(len(arguments))]
    else:
        arguments.insert(chooser.randint(0, len(arguments)), _value(chooser))


def _change_order(chooser: random.Random, document: Any) -> None:
    nodes = document["nodes"]
    one, other = chooser.randrange(len(nodes)), chooser.randrange(len(nodes))
    match chooser.randrange(3):
        case 0:
            nodes[one], nodes[other] = nodes[other], nodes[one]
        case 1:
            nodes.insert(one, copy.deepcopy(nodes[other]))
        case _:
            del nodes[one]


def _change_binding(chooser: random.Random, document: Any) -> None:
    names = document["bindings"]
    names[chooser.randrange(len(names))] = chooser.choice((*_NAMES, chooser.choice(names)))


def _change_anything(chooser: random.Random, document: Any) -> None:
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = chooser.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or chooser.random() < 0.2:
            break
        place = place[key]
    if chooser.random() < 0.2:
        del place[key]
    elif isinstance(place, dict) and chooser.random() < 0.3:
        place[chooser.choice((CODE, "node", "tuple", "float"))] = place.pop(key)
    else:
        place[key] = _value(chooser)


def _value(chooser: random.Random) -> Any:
    return copy.deepcopy(chooser.choice(_VALUES))


_PROGRAM_CHANGES: tuple[Callable[[random.Random, Any], None], ...] = (
    _change_keyword,
    _change_operator,
    _change_argument,
    _change_argument,
    _change_count,
    _change_order,
    _change_binding,
    _change_anything,
    _change_anything,
)


class Watch:
    """What this process does, by audit events, that reading data must not do."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._root: Path | None = None
        sys.addaudithook(self._hear)

    def prepare(self, files: dict[str, bytes], folder: Path) -> None:
        """Import a whole bundle once: what is imported late would count as executed."""
        with suppress(AssertionError):
            import_forged(files, folder, self)
        assert import_forged(files, folder, self)

    @contextmanager
    def over(self, root: Path) -> Iterator[list[str]]:
        """Note what is executed, and what is written outside ``root``."""
        self.seen, self._root = [], root
        try:
            yield self.seen
        finally:
            self._root = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._root is None:
            return
        is_written = event in _WRITES and (event != "open" or _opens_to_write(*arguments))
        is_elsewhere = is_written and not str(arguments[0]).startswith(str(self._root))
        if is_elsewhere or event.startswith(_EXECUTES):
            self.seen.append(f"{event} {arguments!r:.100}")


def _opens_to_write(path: object, mode: object, flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


_WRITES = ("open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree")
# Importing a module executes it, too.
_EXECUTES = (
    *"compile exec os.system os.exec os.posix_spawn os.fork subprocess".split(),
    *"ctypes. socket. pickle. marshal.load code. pty.".split(),
)


def import_forged(files: dict[str, bytes], folder: Path, watch: Watch) -> bool:
    """Import a bundle as ``rbln-serve cache import`` does; whether it was accepted.

    Raises ``AssertionError`` where anything was executed, or written elsewhere, or where a graph
    that was imported is not a valid program.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    bundle, root = folder / "bundle.tar", folder / "root"
    with bundle.open("wb") as file:
        write_archive(file, files)
    with watch.over(folder) as seen:
        code = main(["cache", "import", str(bundle), "--cache-root", str(root)])
        programs = [
            check_program(path.read_bytes())
            for path in sorted(root.rglob("program.json"))
            if read_manifest(path.parent).key.fields["backend_sources"] == sources_digest()
        ]
    assert seen == [], seen
    for program in programs:
        # The SDK takes source, which is written here, of what has passed: it defines a function.
        with watch.over(folder) as seen:
            text = get_module(program, [torch.ones(1)] * len(program.bindings), None).code
        assert {one.partition(" ")[0] for one in seen} <= {"compile", "exec"}, seen
        assert CODE not in text
        assert [type(part) for part in ast.parse(text).body] == [ast.FunctionDef]
    assert code in (0, 1)
    assert code == 0 or not root.exists()
    return code == 0


def check_program(data: bytes) -> Program:
    """Do with an accepted program what a start does, but for running it."""
    program = Program.from_bytes(data)
    assert program.to_bytes() == data
    CallList(program.graph)
    return program


def run_campaign(root: Path, count: int, seed: int) -> None:
    """Forge ``count`` bundles of the graphs in a cache root and print how many were accepted."""
    files = collect(root, GraphChecks(), kernel_keys=()).to_files()
    accepted, watch = 0, Watch()
    with tempfile.TemporaryDirectory() as folder:
        watch.prepare(files, Path(folder) / "whole")
        for number in range(count):
            forged = forge(random.Random(f"{seed} {number}"), files)
            accepted += import_forged(forged, Path(folder) / "forged", watch)
    sys.stdout.write(f"{count} bundles, {accepted} accepted\n")


if __name__ == "__main__":
    run_campaign(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
