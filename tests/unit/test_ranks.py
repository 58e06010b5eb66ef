"""Numbers of ranks: unique in a service, and what each of them is there for."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import ParallelConfig, VllmConfig

from rbln_backend.buckets import BucketTable
from rbln_backend.config import RblnConfig
from rbln_backend.core import GraphSpec, Phase, StepRound
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.settings import EngineSettings
from rbln_backend.usage import UsageFile
from rbln_backend.worker.metrics import StepMetrics, UsageRecorder, open_recorder
from rbln_backend.worker.ranks import agreed, rank_place
from rbln_backend.worker.weights import WrittenElements
from tests.kernel_cache import share_kernels
from tests.warm_process import warm_process


def config(engine: int = 0, *, engines: int = 1, **sizes: int) -> VllmConfig:
    made = VllmConfig(parallel_config=ParallelConfig(**sizes))
    made.parallel_config.data_parallel_index = engine
    made.parallel_config.data_parallel_rank_local = engine
    made.additional_config = EngineSettings(RblnConfig(), engines, {})
    return made


def test_rank_numbers_and_local_numbers_are_unique() -> None:
    places = [
        rank_place(config(engine, engines=2, tensor_parallel_size=2), rank, rank)
        for engine in range(2)
        for rank in range(2)
    ]
    assert [place.number for place in places] == [0, 1, 2, 3]
    assert [place.local_number for place in places] == [0, 1, 2, 3]
    assert {place.local_ranks for place in places} == {4}
    assert [place.counts_steps for place in places] == [True, False, True, False]


@pytest.mark.parametrize(
    ("tensor", "stages", "replying"), [(1, 1, 0), (2, 1, 0), (4, 1, 0), (2, 2, 2), (1, 4, 3)]
)
def test_the_first_rank_counts_and_that_of_the_last_stage_replies(
    tensor: int, stages: int, replying: int
) -> None:
    sizes = config(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    places = [rank_place(sizes, rank, rank) for rank in range(tensor * stages)]
    assert [place.rank for place in places if place.counts_steps] == [0]
    # The one whose output vLLM's executor takes.
    assert [place.rank for place in places if place.replies] == [replying]


def test_ray_sets_the_number_of_ranks_on_a_host() -> None:
    sizes = config(tensor_parallel_size=4)
    sizes.parallel_config.assigned_physical_gpu_ids = [0, 1]
    place = rank_place(sizes, 3, 1)
    assert (place.number, place.local_number, place.local_ranks) == (3, 1, 2)


def test_named_devices_are_no_ranks() -> None:
    sizes = config(tensor_parallel_size=2)
    sizes.parallel_config.assigned_physical_gpu_ids = [4, 5, 6, 7]
    assert rank_place(sizes, 1, 1).local_ranks == 2


# ----------------------------------------------------------------------------------- step agreement
PREFILL, POOLING, DECODE, IDLE = 0, 1, 2, -1


@pytest.mark.parametrize(
    ("wanted", "rounds"),
    [
        # Batches have the size of the largest; chunks come before them, pooling has its own round.
        ([(DECODE, 1), (DECODE, 7), (IDLE, 0), (DECODE, 3)], [(Phase.DECODE, 7, (1, 7, 0, 3))]),
        (
            [(DECODE, 4), (PREFILL, 20), (PREFILL, 64)],
            [(Phase.PREFILL, 64, (0, 20, 64)), (Phase.DECODE, 4, (4, 0, 0))],
        ),
        ([(POOLING, 9), (IDLE, 0)], [(Phase.POOLING, 9, (9, 0))]),
        ([(IDLE, 0), (IDLE, 0)], []),
    ],
)
def test_ranks_agree_on_the_rounds_of_a_step(wanted: Any, rounds: Any) -> None:
    assert agreed(wanted) == [StepRound(*one) for one in rounds]


# ----------------------------------------------------------------------------------- usage recorder
def recorded(file: UsageFile) -> dict[int, int]:
    return file.read().phases["decode"].steps_by_size


@pytest.mark.parametrize("period_s", [0.0, 60.0])
def test_counts_are_written_periodically_and_on_close(tmp_path: Path, period_s: float) -> None:
    file = UsageFile(tmp_path / "model.json")
    recorder = UsageRecorder(file, period_s=period_s)
    recorder.note("decode", 2, 4, 0.01)
    deadline = time.monotonic() + 10
    while not period_s and recorded(file) != {2: 1} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorded(file) == ({} if period_s else {2: 1})
    for size in (2, 1):
        recorder.note("decode", size, 4, 0.01)
    recorder.close()
    assert recorded(file) == {2: 2, 1: 1}


def test_steps_that_check_drafts_count_as_decode_steps(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "model.json")
    recorder = UsageRecorder(file)
    specs = [GraphSpec.of(Phase.DECODE, 4), GraphSpec.of(Phase.VERIFY, 4, 8)]
    metrics = StepMetrics(MetricsBoard(None, 0), specs, recorder)
    metrics.record(specs[0], 3, 3, 0.01)
    metrics.record(specs[1], 3, 20, 0.03)
    recorder.close()
    found = file.read().phases["decode"]
    assert (found.steps_by_size, found.mean_seconds()) == ({3: 2}, {4: 0.02})


def test_an_unwritable_folder_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    recorder = UsageRecorder(UsageFile(tmp_path / "taken" / "model.json"), period_s=0.0)
    recorder.note("decode", 1, 1, 0.01)
    recorder.close()


def test_each_configuration_has_its_own_file(tmp_path: Path) -> None:
    def record(
        decode: tuple[int, ...] = (1, 4), threads: int = 2, **fields: Any
    ) -> tuple[Path, str]:
        model: Any = SimpleNamespace(model="org/m", dtype=torch.float32)
        tables = {Phase.DECODE: BucketTable(decode), Phase.PREFILL: BucketTable((16,))}
        device = {"device": "cpu", "threads": threads}
        recorder = open_recorder(tmp_path, model, {"dtype": "float32"} | fields, device, tables)
        recorder.note("decode", 1, 1, 0.01)
        recorder.close()
        return recorder.path, UsageFile(recorder.path).read().about["device"]

    plain, name = record()
    assert record((2, 4)) == (plain, name), "buckets may change: step times of a bucket hold"
    adapted, named = record(lora={"max_rank": 8})
    assert (name, named) == ("cpu torch.float32", "cpu torch.float32, adapters")
    others = {record(dtype="bfloat16")[0], record(threads=4)[0], adapted}
    assert len({plain, *others}) == 4
    assert UsageFile(plain).read().steps == 2


# ---------------------------------------------------------------------------------- weight coverage
class Joined(nn.Module):
    """Two parameters, one of which files hold in two parts, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 6, bias=False)
        self.own = nn.Linear(4, 2)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.both.weight


def test_elements_are_counted_once_and_by_storage() -> None:
    model = Joined()
    with WrittenElements(model) as written:
        for _ in range(2):
            model.both.weight.data[:3].copy_(torch.ones(3, 4))
        model.own.weight.data.copy_(torch.ones(2, 4))
        model.own.bias.data = torch.ones(2)
    assert written.missing() == ["both.weight"]
    with WrittenElements(model) as written:
        model.both.weight.data[:3].copy_(torch.ones(3, 4))
        model.both.weight.data.narrow(0, 3, 3).fill_(0)
    assert written.missing() == ["own.weight", "own.bias"]


# ------------------------------------------------------------------------------------------ channel
SCRIPT = Path(__file__).parent / "channel_ranks.py"


@pytest.mark.slow
def test_ranks_agree_over_shared_memory_and_gloo(tmp_path: Path) -> None:
    kernels = share_kernels(tmp_path / "cache")
    rest = [str(tmp_path / "meeting"), str(kernels)]
    path = os.pathsep.join(filter(None, (str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH"))))
    environ = dict(os.environ) | {"PYTHONPATH": path}
    with (tmp_path / "log").open("wb") as log:
        ranks = [
            warm_process().start(
                str(rank), *rest, environ=environ, output=log, errors=log, script=SCRIPT
            )
            for rank in range(2)
        ]
    try:
        statuses = [rank.wait(120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert statuses == [0, 0], (tmp_path / "log").read_text()[-3000:]
