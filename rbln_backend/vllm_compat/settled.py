"""`Settled`: the configuration that all processes of a service share, inside vLLM's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rbln_backend.buckets import EngineBuckets
from rbln_backend.config import RblnConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Settled:
    """The object that replaces the mapping in `VllmConfig.additional_config`.

    vLLM accepts any object there that has `compute_hash`, and pickles it with the rest.
    """

    rbln: RblnConfig
    local_engines: int
    """Data-parallel engines on this host, which vLLM does not pass to engines of dense models."""
    others: Mapping[str, Any]
    """Entries of the mapping that vLLM's own models read."""
    buckets: EngineBuckets | None = None
    """The compiled sizes; None where vLLM makes a configuration without a model."""

    def compute_hash(self) -> str:
        """Return the digest by which vLLM compares configurations."""
        content = [self.rbln.to_dict(), self.local_engines, dict(self.others)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def settled(config: VllmConfig) -> Settled:
    """Return what the platform stored in vLLM's configuration."""
    found = config.additional_config
    assert isinstance(found, Settled), "RblnPlatform.check_and_update_config ran first"
    return found


def compiled_sizes(config: VllmConfig) -> EngineBuckets:
    """Return the compiled sizes of an engine."""
    found = settled(config).buckets
    assert found is not None, "an engine has a model"
    return found
