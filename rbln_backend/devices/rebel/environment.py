"""Environment variables of the RBLN SDK, which has no other interface for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rbln_backend.errors import ConfigError, UnsupportedModelError

VISIBLE = "RBLN_VISIBLE_DEVICES"
_OLD_VISIBLE = "RBLN_DEVICES"
_PER_DEVICE = "RBLN_NPUS_PER_DEVICE"
_LOCAL_RANK = "LOCAL_RANK"
_WORLD_SIZE = "WORLD_SIZE"
_STANDALONE = "RBLN_CTX_STANDALONE"
_ASYNCHRONOUS = "RBLN_FORCE_CCL_ASYNC"
_THREADS = "RBLN_NUM_THREADS"
_FINDS_PORTS = "RCCL_PORT_GEN"
_QUANT_BITS = "RBLN_QUANT_BITS"


@dataclass(frozen=True, slots=True)
class RankDevices:
    """Which of a host's NPUs a rank is given."""

    local_number: int
    """The rank's place among all that share the host."""
    rank: int
    """Among the ranks of all engines."""
    ranks: int
    """Of all engines."""
    npus_per_rank: int
    assigned: Sequence[int] | None = None
    """The engine's NPUs on this host, by ``local_rank``; None: those that are visible."""
    local_rank: int = 0
    """Among the ranks of its engine that share the host."""
    finds_ports: bool = False
    """Process groups are the SDK's own, which finds ports for them."""


def announce_rank(devices: RankDevices) -> list[str]:
    """Restrict this process to its own NPUs and set the SDK's rank variables.

    Call it before the SDK makes a context: the vendor's worker sets the same before its own does.
    Returns warnings about what the user has set. Raises ``ConfigError`` where
    ``RBLN_VISIBLE_DEVICES`` names too few NPUs.
    """
    environment, warnings = os.environ, []
    # The runtime takes the old name first, and all ranks would open the same NPUs.
    old = environment.pop(_OLD_VISIBLE, None)
    if old is not None:
        taken = environment.setdefault(VISIBLE, old)
        warnings.append(f"{_OLD_VISIBLE} is the old name of {VISIBLE}, which is {taken!r} here")
    environment[VISIBLE] = ",".join(_own_devices(environment.get(VISIBLE), devices))
    if devices.npus_per_rank > 1:
        environment[_PER_DEVICE] = str(devices.npus_per_rank)
    environment[_LOCAL_RANK] = str(devices.rank)
    environment[_WORLD_SIZE] = str(devices.ranks)
    if devices.finds_ports:
        environment[_FINDS_PORTS] = "1"
    if devices.ranks > 1:
        environment[_STANDALONE] = "1"
        if environment.setdefault(_ASYNCHRONOUS, "1") == "0":
            warnings.append(
                f"{_ASYNCHRONOUS}=0 makes collectives wait for the host; unset it unless you "
                "debug them"
            )
    return warnings


def announce_threads(threads: int) -> None:
    """Set the threads of torch, and of the SDK's compiler and runtime, on the host."""
    os.environ[_THREADS] = str(threads)
    torch.set_num_threads(threads)


def _own_devices(visible: str | None, devices: RankDevices) -> list[str]:
    if devices.assigned is not None and devices.npus_per_rank == 1:
        if devices.local_rank >= len(devices.assigned):
            raise ConfigError(
                f"--device-ids names {len(devices.assigned)} NPUs, rank {devices.rank} is number "
                f"{devices.local_rank} of its host; name one for each rank"
            )
        return [str(devices.assigned[devices.local_rank])]
    first = devices.local_number * devices.npus_per_rank
    numbers = range(first, first + devices.npus_per_rank)
    if visible is None or not visible.strip():
        return [str(number) for number in numbers]
    named = [part.strip() for part in visible.split(",")]
    if numbers.stop > len(named):
        raise ConfigError(
            f"{VISIBLE}={visible!r} names {len(named)} NPUs, but rank {devices.rank} is given "
            f"number {first} to {numbers.stop - 1} of them; name one for each rank of this host"
        )
    return [named[number] for number in numbers]


def announce_quant_bits(bits: int) -> None:
    """Tell the SDK's compiler how many bits the int8 weights of the graphs stand for.

    The SDK knows one width: raises ``UnsupportedModelError`` for a second one.
    """
    announced = os.environ.setdefault(_QUANT_BITS, str(bits))
    if announced != str(bits):
        raise UnsupportedModelError(
            f"the model has weights of {announced} and of {bits} bits: the RBLN SDK takes one "
            f"width ({_QUANT_BITS}); serve a checkpoint of one width, or run it on the emulated "
            "device"
        )
