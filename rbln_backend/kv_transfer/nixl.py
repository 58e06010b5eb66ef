"""vLLM's NIXL connector, narrowed to what this backend's blocks allow.

A decode server reads the blocks of a prompt out of the memory of the server that computed them
(pull). NIXL and vLLM do the transfer, the leases and the handshake. What is added here: a prompt is
compared with the one whose blocks are offered, a peer must compute KV as this server does, and
block numbers of a request are checked against the peer's cache.

Keys and values of a layer are two regions of memory, so that ranks can read some of the heads: a
block of a layer is [2, Hkv, 1, block_size, D], heads are contiguous within its keys and within its
values, but not within the block. vLLM's connector divides a block of a region by heads where two
servers have different tensor-parallel sizes. A layer of latent attention is one region: it caches
values within keys, which each rank has whole.

NIXL's thread sleeps between events here: nixl 1.5 makes it poll without a pause, which takes a
whole core, and has no option for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import Request, RequestStatus

from rbln_backend.devices.port import device_capabilities
from rbln_backend.errors import ConfigError
from rbln_backend.graphs.model_fields import model_fields
from rbln_backend.kv_cache.specs import PagedSpec, get_parts, layer_specs
from rbln_backend.kv_transfer.page_store import weights_digest
from rbln_backend.settings import configured

_PARTS = ("keys", "values")
_LATENT_RANK = 3
"""Dimensions of a cache of latent attention on an NPU."""


def with_head_regions(config: KVCacheConfig) -> KVCacheConfig:
    """Return ``config`` with two layers, of half the block each, in place of every layer.

    ``LAYER.keys`` and ``LAYER.values`` are the names, in the order of blocks' memory. Of latent
    attention there are keys alone.
    """
    groups = []
    for group in config.kv_cache_groups:
        specs = layer_specs(group.kv_cache_spec, group.layer_names)
        assert all(isinstance(spec, PagedSpec) for spec in specs.values()), "by check_cached_layers"
        halves = {
            f"{name}.{part}": dataclasses.replace(spec, head_size_v=0)
            for name, spec in specs.items()
            for part in _PARTS[: get_parts(spec)]
        }
        spec: KVCacheSpec = next(iter(halves.values()))
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            spec = dataclasses.replace(group.kv_cache_spec, kv_cache_specs=dict(halves))
        groups.append(dataclasses.replace(group, layer_names=[*halves], kv_cache_spec=spec))
    return dataclasses.replace(config, kv_cache_groups=groups)


def head_regions(caches: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of the layers of ``with_head_regions``.

    ``caches``: [num_blocks, 2, Hkv, 1, block_size, D] by layer name; the views lack the second
    dimension. Caches of latent attention have 1 in its place or, on an NPU, are
    [num_blocks, block_size, D].
    """
    regions: dict[str, Tensor] = {}
    for name, cache in caches.items():
        parts = [cache] if cache.dim() == _LATENT_RANK else cache.unbind(1)
        regions |= {f"{name}.{part}": view for part, view in zip(_PARTS, parts, strict=False)}
    return regions


_SHORT = 12


def kv_origin(config: VllmConfig, kv_cache: KVCacheConfig) -> str:
    """Return a readable description, equal for servers whose blocks of a prompt are equal.

    Compiled sizes and the number of blocks may differ, and so may kernels of different
    instruction sets: their results differ by rounding alone. Raises ``ConfigError`` for weights
    that are not on this host.
    """
    rbln, model = configured(config), config.model_config
    fields = model_fields(config, rbln)
    del fields["rbln"]
    versions = {name: fields.pop(name) for name in ("torch", "vllm", "backend_sources")}
    layers = [
        [group.layer_names, type(group.kv_cache_spec).__name__]
        for group in kv_cache.kv_cache_groups
    ]
    options = [model.override_generation_config, rbln.enforce_model_fp32, layers]
    weights = weights_digest(model.model, str(config.load_config.load_format), model.seed)
    return (
        f"model {model.architecture} ({_digest([fields, options])}), "
        f"weights {weights[:_SHORT]}, dtype {fields['dtype']}, "
        f"KV dtype {fields['kv_dtype']}, context {model.max_model_len}, "
        f"blocks of {config.cache_config.block_size} tokens, vLLM {versions['vllm']}, "
        f"torch {versions['torch']}, backend {versions['backend_sources'][:_SHORT]}"
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT]


# The thread wakes for events of sockets; what else it has to do waits at most so long.
_PAUSE_US = 1000


@contextmanager
def sleeping_progress() -> Iterator[None]:
    """Make agents whose thread pauses for 1 ms; a nixl without the setting keeps its own."""
    api: Any = sys.modules.get(getattr(NixlWrapper, "__module__", ""))
    bindings = getattr(api, "nixlBind", None)
    if bindings is None or not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
        yield
        return
    api.nixlBind = _PausingBindings(bindings)
    try:
        yield
    finally:
        api.nixlBind = bindings


class _PausingBindings:
    """NIXL's bindings with a configuration of agents whose pause cannot be set to 0."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bindings, name)
        return _pausing(found) if name == "nixlAgentConfig" else found


def _pausing(base: Any) -> Any:
    """Return a class like ``base``, nixl's, that ignores the pause that it is given."""

    def read(config: Any) -> Any:
        return base.pthrDelay.__get__(config)

    def write(config: Any, _: Any) -> None:
        base.pthrDelay.__set__(config, _PAUSE_US)

    return type("PausingAgentConfig", (base,), {"pthrDelay": property(read, write)})


class UnsavedBlocks:
    """Collects the blocks of a request over the steps that compute its prompt."""

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[list[int], ...]] = {}

    def take(
        self, output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> Iterator[tuple[str, tuple[list[int], ...]]]:
        """Yield id and blocks by group of each of ``requests`` whose last chunk ``output`` has."""
        for name, blocks, is_resumed in yield_req_data(output):
            request = requests.get(name)
            if request is None:
                continue
            if blocks is not None and (is_resumed or name not in self._blocks):
                # A new or resumed request names all that it has.
                self._blocks[name] = tuple(list(group) for group in blocks)
            elif blocks is not None:
                for known, more in zip(self._blocks[name], blocks, strict=True):
                    known.extend(more)
            # The tokens of ``output`` are counted: our scheduler describes a step when it is whole.
            if request.num_computed_tokens >= request.num_prompt_tokens:
                yield name, self._blocks.pop(name)

    def forget(self, name: str) -> None:
        self._blocks.pop(name, None)


logger = init_logger(__name__)

PROMPT_DIGEST = "rbln_prompt_digest"
"""Key of ``kv_transfer_params`` with a digest of the prompt's tokens."""
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class RblnNixlConnector(NixlPullConnector):
    """vLLM's connector with our scheduler's and worker's side."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Upstream's constructor would make its own sides.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        sides = (vllm_config, self.engine_id, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = PromptScheduling(*sides)
        else:
            self.connector_worker = CheckedBlocksWorker(*sides)


class PromptScheduling(NixlPullConnectorScheduler):
    """The scheduler's side: blocks are read for the very prompt that they were computed for."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        # Upstream decides it by vLLM's name of the device, which is ``cpu`` for NPUs, too.
        self.use_host_buffer = not device_capabilities(configured(vllm_config)).runs_on_host
        self._unsaved = UnsavedBlocks()

    def _build_save_meta(
        self, meta: NixlConnectorMetadata, scheduler_output: SchedulerOutput
    ) -> None:
        """Have the blocks of prompts that this step completes copied to host memory.

        Upstream copies a block in the step that allocates it, which has filled it only where a
        block is at most a chunk.
        """
        for name, blocks in self._unsaved.take(scheduler_output, self._reqs_need_save):
            request = self._reqs_need_save.pop(name)
            assert request.kv_transfer_params is not None
            meta.add_new_req_to_save(
                request_id=name,
                local_block_ids=blocks,
                kv_transfer_params=request.kv_transfer_params,
            )

    def set_xfer_handshake_metadata(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """As upstream, whose listener ends without a word where its port is taken."""
        host, port = self.side_channel_host, self.side_channel_port
        try:
            with socket.create_server((host, port)):
                pass
        except OSError as error:
            raise ConfigError(
                f"VLLM_NIXL_SIDE_CHANNEL_PORT={port} on {host!r} (VLLM_NIXL_SIDE_CHANNEL_HOST): "
                f"{error.strerror or error}; each server of a host needs a port of its own"
            ) from error
        super().set_xfer_handshake_metadata(metadata)

    def unrequested(self, waiting: Iterable[Request]) -> list[Request]:
        """Return those of ``waiting`` whose blocks are not requested yet, in their order."""
        return [request for request in waiting if self.is_unrequested(request)]

    def is_unrequested(self, request: Request) -> bool:
        """Return whether blocks of ``request`` have to be requested before it can begin.

        They are offered by the server that has them, and fit the prompt.
        """
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            return False
        params = request.kv_transfer_params
        return bool(
            params and params.get("do_remote_prefill") and _mismatch(params, request) is None
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the tokens to read, 0 if the offered blocks are of another prompt, and whether."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            reason = _mismatch(params, request)
            if reason is not None:
                logger.warning("%s: the prompt is computed here: %s", request.request_id, reason)
                return 0, False
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return tokens, is_async

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...] | list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As upstream, with the digest of the prompt in what a decode server gets."""
        self._unsaved.forget(request.request_id)
        self._reqs_need_save.pop(request.request_id, None)
        keeps, params = super().request_finished(request, block_ids)
        if params is not None:
            params[PROMPT_DIGEST] = prompt_digest(request)
        return keeps, params


class CheckedBlocksWorker(NixlPullConnectorWorker):
    """The worker's side: peers must make the same KV, and blocks must exist."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        self._origin = kv_origin(vllm_config, kv_cache_config)
        self._hash: str | None = None
        with sleeping_progress():
            super().__init__(vllm_config, engine_id, with_head_regions(kv_cache_config))

    @property
    def compat_hash(self) -> str | None:
        """Upstream's hash and, readable in the error of a refused handshake, what makes our KV."""
        return self._hash

    @compat_hash.setter
    def compat_hash(self, value: str | None) -> None:
        self._hash = None if value is None else f"{self._origin}; vLLM's hash {value[:16]}"

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Register host memory [num_blocks, 2, Hkv, 1, block_size, D] by layer name."""
        super().register_kv_caches(head_regions(kv_caches))

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Have blocks copied between the registered memory and the caches of an NPU."""
        self.use_host_buffer = True
        self.host_xfer_buffers = self.device_kv_caches
        self.copy_blocks = copy_operation

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        assert meta.remote is not None
        most = self.dst_num_blocks[meta.remote.engine_id]
        reason = _blocks_fault(meta, most)
        if reason is None:
            super()._read_blocks_for_req(req_id, meta)
            return
        logger.error("%s: blocks of %s: %s", req_id, meta.remote.engine_id, reason)
        self._handle_failed_transfer(req_id, None, self._recv_failures)


def prompt_digest(request: Request) -> str:
    """Return a digest of the prompt's tokens and of what separates its prefixes from others'."""
    tokens = np.asarray(request.prompt_token_ids or [], dtype=np.int64)
    salt = (request.cache_salt or "").encode()
    return hashlib.sha256(tokens.tobytes() + salt).hexdigest()


def _mismatch(params: dict[str, Any], request: Request) -> str | None:
    """Return why the offered blocks cannot be those of the prompt of ``request``, or None."""
    if request.num_prompt_tokens == 1:
        # The last token is always computed, and upstream takes a request without others as new.
        return "it has one token"
    missing = [name for name in _NEEDED if params.get(name) is None]
    if missing or not params.get("remote_block_ids"):
        return f"kv_transfer_params lack {missing[0] if missing else 'remote_block_ids'}"
    if params.get("remote_num_tokens") != request.num_prompt_tokens:
        return (
            f"remote_num_tokens is {params.get('remote_num_tokens')}, "
            f"the prompt has {request.num_prompt_tokens}"
        )
    if params.get(PROMPT_DIGEST) != prompt_digest(request):
        return f"{PROMPT_DIGEST} is that of another prompt"
    return None


def _blocks_fault(meta: ReqMeta, most: int) -> str | None:
    """Return what is wrong with the blocks to read from a cache of ``most`` blocks, or None."""
    assert meta.remote is not None
    if len(meta.local_block_ids) > len(meta.remote.block_ids):
        return f"{len(meta.remote.block_ids)} groups for {len(meta.local_block_ids)}"
    for own, remote in zip(meta.local_block_ids, meta.remote.block_ids, strict=False):
        if len(own) > len(remote):
            return f"{len(remote)} blocks for {len(own)}"
        outside = [block for block in remote if not 0 <= block < most]
        if outside:
            return f"block {outside[0]} of {most}"
    return None
