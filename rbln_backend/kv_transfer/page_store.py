"""Both KV tiers behind two background threads: a step neither reads nor writes a file.

The tier in host memory holds pages by key, least recently used first out. The tier in files is a
bounded folder, which servers of one host can share: a page is written beside its place and renamed,
so a reader meets no part of one. What a crash or a disk leaves damaged fails its checksum: it is a
miss, and its file is removed. A page in a file has a header that says what it is, then K and V of
every layer; its key says what computed it, and the prefix that ends with it.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import shutil
import struct
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig

from rbln_backend.errors import ConfigError, UntrustedFileError
from rbln_backend.host.files import make_trusted_folder
from rbln_backend.kv_cache.specs import WindowSpec, any_layer_spec, get_parts, layer_specs


def new_page(num_bytes: int) -> Tensor:
    """Return memory for a page, bytes [num_bytes], of undefined content.

    It lies on small pages of the system. Large tensors lie on huge pages, and on virtual machines
    the first use of one can take milliseconds, longer than writing the file.
    """
    memory = mmap.mmap(-1, num_bytes)
    with suppress(OSError):
        # A system without huge pages does not know the advice.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


# A file per page: larger ones waste the end of a prefix, smaller ones cost more than they save.
_WANTED_TOKENS = 128


@dataclass(frozen=True)
class PageLayout:
    """Sizes of pages, which all cover the same tokens."""

    tokens: int
    num_bytes: int
    """Of a page of all paged layers."""
    window_bytes: Mapping[int, int]
    """Of a page of each window group, by number of the group."""

    @classmethod
    def of(cls, config: KVCacheConfig, unit: int, block_sizes: Sequence[int]) -> PageLayout:
        """Return the layout for prefixes that are reused in units of ``unit`` tokens.

        A page lies within one block: it divides all ``block_sizes``.
        """
        block = math.gcd(*block_sizes)
        sizes = [n for n in range(unit, block + 1, unit) if block % n == 0]
        tokens = max((n for n in sizes if n <= _WANTED_TOKENS), default=sizes[0])
        paged, windows = 0, dict[int, int]()
        for index, group in enumerate(config.kv_cache_groups):
            specs = layer_specs(group.kv_cache_spec, group.layer_names).values()
            sizes_of_token = [(get_parts(x), x.num_kv_heads, x.head_size) for x in specs]
            itemsize = any_layer_spec(group.kv_cache_spec).dtype.itemsize
            group_bytes = tokens * itemsize * sum(map(math.prod, sizes_of_token))
            if isinstance(any_layer_spec(group.kv_cache_spec), WindowSpec):
                windows[index] = group_bytes
            else:
                paged += group_bytes
        return cls(tokens, paged, windows)


_MAGIC = b"RBLNKV1\n"
# Magic, key, checksum of key and payload, bytes of the payload.
_HEADER = struct.Struct("<8s32s32sQ")
HEADER_BYTES = _HEADER.size


def get_header(key: bytes, payload: memoryview) -> bytes:
    return _HEADER.pack(_MAGIC, key, _checksum(key, payload), payload.nbytes)


def is_page(header: bytes, key: bytes, payload: memoryview) -> bool:
    """Return whether ``payload`` is, bit by bit, what was stored under ``key``."""
    if len(header) != HEADER_BYTES:
        return False
    magic, own_key, checksum, length = _HEADER.unpack(header)
    if (magic, own_key, length) != (_MAGIC, key, payload.nbytes):
        return False
    return bool(checksum == _checksum(key, payload))


def _checksum(key: bytes, payload: memoryview) -> bytes:
    return blake3(key).update(payload).digest()


# Raise it when pages are laid out in another way than before.
_FORM = 1


class PageKeys:
    """Keys of 32 bytes. Pages of other weights, kernels or layouts have other keys."""

    def __init__(self, made_by: Mapping[str, Any]) -> None:
        """``made_by``: everything besides the tokens that changes a page, as JSON values."""
        content = json.dumps({"form": _FORM, **made_by}, sort_keys=True, default=str)
        self._base = blake3(content.encode())

    @property
    def folder_name(self) -> str:
        """Name of the folder of all pages with this origin."""
        return self._base.hexdigest(length=16)

    def key(self, prefix: bytes, window_group: int | None = None) -> bytes:
        """Return the key of the page that ends the prefix with vLLM's hash ``prefix``.

        It is a page of all paged layers, or of one window group.
        """
        group = b"" if window_group is None else b"window %d" % window_group
        return self._base.copy().update(prefix).update(group).digest()


_WEIGHTS = (".safetensors", ".bin", ".pt")


def weights_digest(model: str, load_format: str, seed: int) -> str:
    """Return a digest of the content of a model's weights, which compute a page.

    ``model`` is a folder or a file; dummy weights follow from ``seed``. Raises ``ConfigError``
    where there is no file to read.
    """
    if load_format == "dummy":
        return f"dummy-{seed}"
    path = Path(model)
    files = [path] if path.is_file() else sorted(path.glob("*"))
    files = [file for file in files if file.suffix in _WEIGHTS]
    if not files:
        raise ConfigError(
            f"{model!r} has no weights on this host ({', '.join(_WEIGHTS)}), and what "
            "unknown weights compute must not be stored; pass the model's folder"
        )
    total = blake3(max_threads=blake3.AUTO)
    for file in files:
        total.update(file.name.encode())
        total.update_mmap(file)
    return total.hexdigest()


READS = ("memory", "folder", "miss", "damaged")
WRITES = ("memory", "folder", "failed")


class MemoryTier:
    """Holds pages up to a number of bytes; of any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._pages: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def get(self, key: bytes) -> Tensor | None:
        """Return the page [page_bytes] of ``key``, not to be changed, or None."""
        with self._lock:
            page = self._pages.get(key)
            if page is not None:
                self._pages.move_to_end(key)
            return page

    def put(self, key: bytes, page: Tensor) -> None:
        """Keep ``page`` [page_bytes] itself, not a copy."""
        with self._lock:
            former = self._pages.pop(key, None)
            self.num_bytes += page.nbytes - (0 if former is None else former.nbytes)
            self._pages[key] = page
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._pages.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
            self.num_bytes = 0


logger = logging.getLogger(__name__)

_SUFFIX = ".kv"
# Eviction makes room for the writes of a while, because it lists all files.
_KEPT_SHARE = 0.9
_OWN_MODE = 0o700


class FolderTier:
    """Pages of one origin below ``root``, whose pages of all origins take ``max_bytes`` at most.

    One thread lists, writes and clears; another may read meanwhile.
    """

    def __init__(self, root: Path, name: str, max_bytes: int) -> None:
        """Raise ``ConfigError`` for a folder that others can write: who writes it, answers."""
        self._root, self._folder = root, root / name
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of all pages below the root, as far as this process knows."""
        self.is_read_only = False
        try:
            make_trusted_folder(root)
            self._folder.mkdir(_OWN_MODE, exist_ok=True)
        except UntrustedFileError as error:
            raise ConfigError(f"KV tiers: {error}; KV caches must be this user's own") from error
        except OSError as error:
            self._read_only(error)
        if not os.access(self._folder, os.W_OK):
            self._read_only(PermissionError(f"{self._folder} cannot be written"))

    def _read_only(self, error: OSError) -> None:
        if not self._folder.is_dir():
            raise ConfigError(f"KV tiers: cannot make {self._folder}: {error}") from error
        self.is_read_only = True
        logger.warning("KV tiers: pages are read and never written: %s", error)

    def known(self) -> Iterator[bytes]:
        """Yield the keys of all pages of this origin, and count the bytes of all origins."""
        self.num_bytes = 0
        for _, size, file in self._files():
            self.num_bytes += size
            if (key := self._key(file)) is not None:
                yield key

    def __contains__(self, key: bytes) -> bool:
        return self._path(key).exists()

    def read(self, key: bytes, page: memoryview) -> bool | None:
        """Fill ``page`` and return True; None where there is no page, False if it is damaged.

        ``page`` is undefined unless True is returned.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
                whole = file.readinto(page) == page.nbytes and not file.read(1)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("KV tiers: cannot read %s: %s", path, error)
            return None
        if whole and is_page(header, key, page):
            with suppress(OSError):
                os.utime(path)
            return True
        logger.warning("KV tiers: %s is damaged and is removed", path)
        with suppress(OSError):
            path.unlink()
        return False

    def write(self, key: bytes, page: memoryview) -> list[bytes]:
        """Store ``page`` and return the keys of pages that were evicted; raises ``OSError``."""
        path = self._path(key)
        path.parent.mkdir(_OWN_MODE, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(get_header(key, page))
                file.write(page)
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise
        self.num_bytes += HEADER_BYTES + page.nbytes
        return self._evict() if self.num_bytes > self._max_bytes else []

    def clear(self) -> None:
        for folder in self._folder.glob("*"):
            shutil.rmtree(folder, ignore_errors=True)
        self.num_bytes = sum(size for _, size, _ in self._files())

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}{_SUFFIX}"

    def _key(self, file: Path) -> bytes | None:
        """Return the key of a page of this origin, None for any other file."""
        if file.suffix == _SUFFIX and file.parent.parent == self._folder:
            with suppress(ValueError):
                return bytes.fromhex(file.stem)
        return None

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield time of last use, bytes and path of every file, of all servers and origins."""
        for file in self._root.glob("*/*/*"):
            with suppress(OSError):
                about = file.stat()
                yield about.st_mtime, about.st_size, file

    def _evict(self) -> list[bytes]:
        """Remove the least recently used files until there is room; return own keys of these."""
        removed: list[bytes] = []
        files = sorted(self._files())
        self.num_bytes = sum(size for _, size, _ in files)
        for _, size, file in files:
            if self.num_bytes <= self._max_bytes * _KEPT_SHARE:
                break
            with suppress(OSError):
                file.unlink()
                self.num_bytes -= size
            if (key := self._key(file)) is not None:
                removed.append(key)
        return removed


# Bytes of pages that one prefix has read and not placed, and of pages that wait to be written.
_READ_BYTES = 64 << 20
_WAITING_BYTES = 256 << 20


@dataclass(frozen=True)
class ReadPlan:
    """Keys of the pages of one prefix."""

    layout: PageLayout
    keys: Sequence[bytes]
    """Of the pages of paged layers that the KV cache lacks, in order."""
    first: int
    """Number of the first of them in the prompt."""
    window_keys: Mapping[int, Sequence[bytes]]
    """Of all pages of the prompt, by window group."""
    spans: Mapping[int, int]
    """Pages before its end that a prefix needs, by window group."""


class WindowPage(NamedTuple):
    """A page of one window group."""

    group: int
    number: int
    """Its number in the prompt."""
    page: Tensor


class PrefixRead:
    """Pages of one prefix, in order, while they are read."""

    def __init__(self, most: int) -> None:
        """``most``: pages of paged layers that lie here at a time."""
        self._most = most
        self._pages: deque[Tensor] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self.windows: list[WindowPage] = []
        """Complete once the reading is over."""

    @property
    def is_over(self) -> bool:
        """True once nothing is left to take and nothing more will come."""
        with self._changed:
            return self._ended and not self._pages

    def put(self, page: Tensor) -> bool:
        """Add a page [page_bytes] once there is room; False after ``end``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._pages) < self._most)
            if not self._ended:
                self._pages.append(page)
            return not self._ended

    def take(self, most: int) -> list[Tensor]:
        """Return at most ``most`` of the next pages [page_bytes] that are there."""
        with self._changed:
            taken = [self._pages.popleft() for _ in range(min(most, len(self._pages)))]
            self._changed.notify_all()
            return taken

    def end(self) -> None:
        """Let no page follow."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class PageStore:
    """Pages by key in memory, in a folder, or in both."""

    def __init__(self, memory: MemoryTier | None, folder: FolderTier | None) -> None:
        self._memory, self._folder = memory, folder
        self._reader = ThreadPoolExecutor(1, "kv-tier-read")
        self._writer = ThreadPoolExecutor(1, "kv-tier-write")
        self._waiting = 0
        self._is_failing = False
        self._known: set[bytes] = set()
        """Pages in the folder, and those that wait to be written."""
        self._reads: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()
        self._lock = threading.Lock()

        def list_known(folder: FolderTier) -> None:
            keys = set(folder.known())
            with self._lock:
                self._known |= keys

        if folder is not None:
            self._writer.submit(list_known, folder)

    def take_counts(self) -> tuple[Counter[str], Counter[str]]:
        """Return the pages read and written since the last call, by one of READS and WRITES."""
        with self._lock:
            taken = self._reads, self._writes
            self._reads, self._writes = Counter(), Counter()
            return taken

    @property
    def memory_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.num_bytes

    @property
    def folder_bytes(self) -> int:
        return 0 if self._folder is None else self._folder.num_bytes

    def knows(self, key: bytes) -> bool:
        """Return whether the page is stored or about to be, as far as this process knows."""
        return key in self._known or (self._memory is not None and key in self._memory)

    def read(self, plan: ReadPlan) -> PrefixRead:
        """Start to read the pages of the longest prefix that can be resumed."""
        job = PrefixRead(max(1, _READ_BYTES // plan.layout.num_bytes))
        self._reader.submit(self._read_all, plan, job)
        return job

    @property
    def room(self) -> int:
        """Bytes that ``write`` may take now, so that those that wait stay few."""
        return max(0, _WAITING_BYTES - self._waiting)

    def write(self, key: bytes, page: Tensor) -> None:
        """Store ``page`` [page_bytes] later."""
        with self._lock:
            self._waiting += page.nbytes
            self._known.add(key)
        self._writer.submit(self._write, key, page)

    def clear(self) -> None:
        """Forget all pages of this origin, in order with the writes before."""

        def forget_all() -> None:
            if self._memory is not None:
                self._memory.clear()
            if self._folder is not None and not self._folder.is_read_only:
                self._folder.clear()
            with self._lock:
                self._known.clear()

        self._writer.submit(forget_all).result()

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)

    def _read_all(self, plan: ReadPlan, job: PrefixRead) -> None:
        try:
            keys = plan.keys[: self._resumable(plan) - plan.first] if plan.spans else plan.keys
            read = 0
            for read, key in enumerate(keys, start=1):  # noqa: B007
                page = self._fetch(key, plan.layout.num_bytes)
                if page is None or not job.put(page):
                    return
            end = plan.first + read
            for group, span in plan.spans.items() if read else ():
                for number in range(max(0, end - span), end):
                    key = plan.window_keys[group][number]
                    page = self._fetch(key, plan.layout.window_bytes[group])
                    if page is not None:
                        job.windows.append(WindowPage(group, number, page))
        except Exception:
            logger.exception("KV tiers: reading failed; the prefix is computed")
        finally:
            job.end()

    def _resumable(self, plan: ReadPlan) -> int:
        """Return the pages of the longest prefix whose end has the pages of all windows."""
        held = takewhile(self._holds, plan.keys)
        for end in range(plan.first + sum(1 for _ in held), plan.first, -1):
            wanted = (plan.window_keys[g][max(0, end - n) : end] for g, n in plan.spans.items())
            if all(map(self._holds, chain.from_iterable(wanted))):
                return end
        return plan.first

    def _holds(self, key: bytes) -> bool:
        is_held = self._memory is not None and key in self._memory
        return is_held or (self._folder is not None and key in self._folder)

    def _fetch(self, key: bytes, num_bytes: int) -> Tensor | None:
        page, result = None if self._memory is None else self._memory.get(key), "memory"
        if page is None:
            result = "miss"
            if self._folder is not None:
                page = new_page(num_bytes)
                is_whole = self._folder.read(key, page.numpy().data)
                result = "folder" if is_whole else "miss" if is_whole is None else "damaged"
        with self._lock:
            self._reads[result] += 1
            if result in ("miss", "damaged"):
                self._known.discard(key)
                return None
        if result == "folder" and page is not None and self._memory is not None:
            self._memory.put(key, page)
        return page

    def _write(self, key: bytes, page: Tensor) -> None:
        results, evicted = list[str](), list[bytes]()
        try:
            if self._memory is not None:
                self._memory.put(key, page)
                results.append("memory")
            if self._folder is not None and not self._folder.is_read_only:
                evicted = self._folder.write(key, page.numpy().data)
                results.append("folder")
                self._is_failing = False
        except OSError as error:
            results.append("failed")
            if not self._is_failing:
                logger.warning("KV tiers: pages cannot be written, requests go on: %s", error)
            self._is_failing = True
        finally:
            with self._lock:
                self._writes.update(results)
                self._waiting -= page.nbytes
                self._known.difference_update(evicted)
                if "folder" not in results:
                    self._known.discard(key)
