"""vLLM's NIXL connector, narrowed to what this backend's blocks allow.

A decode server reads the blocks of a prompt out of the memory of the server that computed them
(pull). NIXL and vLLM do the transfer, the leases and the handshake. What is added here: a prompt is
compared with the one whose blocks are offered, a peer must compute KV as this server does, and
block numbers of a request are checked against the peer's cache.
"""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import numpy as np
from torch import Tensor

from rbln_backend.compiler.device import device_capabilities
from rbln_backend.errors import ConfigError
from rbln_backend.kv_transfer.head_regions import head_regions, with_head_regions
from rbln_backend.kv_transfer.kv_origin import kv_origin
from rbln_backend.kv_transfer.progress_delay import sleeping_progress
from rbln_backend.kv_transfer.unsaved_blocks import UnsavedBlocks
from rbln_backend.vllm_compat.kv_connector import (
    CopyBlocksOp,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    NixlConnectorMetadata,
    NixlPullConnector,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
    ReqMeta,
)
from rbln_backend.vllm_compat.surface import (
    KVCacheConfig,
    Request,
    SchedulerOutput,
    VllmConfig,
    configured,
    init_logger,
)

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

    def will_read(self, request: Request) -> bool:
        """Return whether blocks of ``request`` are offered that fit it and are not requested."""
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
