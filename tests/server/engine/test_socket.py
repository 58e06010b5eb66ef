"""Messages arrive whole and in order through the socket that the engine's client reads from."""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from socket import create_connection
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from rbln_backend.host.resources import HostMemory
from server.engine import weight_files as module
from server.engine.outputs import DeferredStats, TokenBytes, defer_stats, keep_prompt_out
from server.engine.socket import EngineSocket, EngineWatch, OutputQueue
from server.engine.weight_files import read_ahead
from tests.checkpoint_tokenizer import EOS_TOKEN, train_tokenizer

TIMEOUT_S = 20


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context


def pair(context: zmq.asyncio.Context, folder: Path) -> tuple[zmq.Socket[Any], EngineSocket]:
    address = f"ipc://{folder / 'engine'}"
    source = context.socket(zmq.PULL)
    source.bind(address)
    sender = zmq.Context(context).socket(zmq.PUSH)
    sender.connect(address)
    return sender, EngineSocket(source)


def test_messages_come_whole_and_in_order(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    sender, receiver = pair(context, tmp_path)

    async def run() -> list[list[bytes]]:
        async def receive() -> list[list[bytes]]:
            return [
                [frame.bytes for frame in await receiver.recv_multipart(copy=False)]
                for _ in range(600)
            ]

        task = asyncio.create_task(receive())
        for number in range(600):
            sender.send_multipart([b"%d" % number, b"x" * (number % 7 * 1000)])
            if number % 50 == 0:
                # The receiver has seen everything and waits.
                await asyncio.sleep(0.002)
        return await asyncio.wait_for(task, TIMEOUT_S)

    received = asyncio.run(run())
    assert received == [[b"%d" % n, b"x" * (n % 7 * 1000)] for n in range(600)]
    receiver.close(linger=0)
    sender.close(linger=0)


def test_copies_are_bytes(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    sender, receiver = pair(context, tmp_path)
    sender.send_multipart([b"a", b"b"])
    assert asyncio.run(asyncio.wait_for(receiver.recv_multipart(), TIMEOUT_S)) == [b"a", b"b"]
    receiver.close(linger=0)
    sender.close(linger=0)


def test_closing_leaves_nothing_on_the_loop(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    sender, receiver = pair(context, tmp_path)

    async def run() -> bool:
        task = asyncio.create_task(receiver.recv_multipart(copy=False))
        await asyncio.sleep(0)
        descriptor = receiver._descriptor
        receiver.close(linger=0)
        task.cancel()
        await asyncio.wait({task})
        return asyncio.get_running_loop().remove_reader(descriptor)

    assert asyncio.run(run()) is False
    sender.close(linger=0)


def test_only_the_end_of_an_engine_is_reported(context: zmq.asyncio.Context) -> None:
    source = context.socket(zmq.ROUTER)
    port = source.bind_to_random_port("tcp://127.0.0.1")
    plain = zmq.Context(context)
    # A context waits for open sockets, also after a failure.
    context.linger = plain.linger = 0

    def peer(kind: int, identity: bytes | None = None) -> zmq.Socket[Any]:
        made = plain.socket(kind)
        if identity is not None:
            made.setsockopt(zmq.IDENTITY, identity)
        made.connect(f"tcp://127.0.0.1:{port}")
        return made

    engines = [b"\x00\x00", b"\x01\x00"]
    peers = [peer(zmq.DEALER, identity) for identity in engines]
    receiver = zmq.Socket.shadow(source.underlying)
    for one in peers:
        one.send(b"ready")
        assert receiver.recv_multipart()[1] == b"ready"
    watch = EngineWatch(source, engines)

    def lost(seconds: float) -> str | None:
        until = time.monotonic() + seconds
        while (found := watch.lost()) is None and time.monotonic() < until:
            time.sleep(0.01)
        return found

    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03"):
        with create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
    # One with the identity of an engine is refused by ZeroMQ.
    for identity in (None, b"other", engines[1]):
        stranger = peer(zmq.DEALER, identity)
        stranger.send_multipart([b"junk", b"junk"])
        time.sleep(0.05)
        stranger.close(linger=0)
    assert lost(0.5) is None
    assert not int(receiver.get(zmq.EVENTS)) & zmq.POLLIN
    # What the check sends has no effect on an engine.
    assert {tuple(peers[0].recv_multipart()) for _ in range(2)} == {(b"\x01", b"\x90")}
    peers[1].close(linger=0)
    assert (lost(TIMEOUT_S) or "").endswith(f"{port} (rank 1)")
    peers[0].close(linger=0)
    watch._monitor.close(linger=0)
    source.close(linger=0)


async def test_the_queue_keeps_order_and_survives_a_cancelled_wait() -> None:
    queue = OutputQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    for number in range(3):
        queue.put_nowait(number)
    assert queue.qsize() == 3
    assert [await queue.get() for _ in range(3)] == [0, 1, 2]
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put_nowait(3)
    assert await asyncio.wait_for(waiting, TIMEOUT_S) == 3
    assert queue.empty()


# ---------------------------------------------------------------------------------- open characters
TEXTS = (
    "The code is 1234 漢字",
    "smile 🙂🙂 end",
    "Ünïcödé",
    "日",
    "bad \ufffd",
    "x",
    "\ufffd" * 9,
)


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like SentencePiece's: spaces begin words, bytes are spelled <0xNN>."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehilmnostx1234 "]
    vocabulary = {word: number for number, word in enumerate(words)}
    options: dict[str, Any] = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], **options))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    of_bytes = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence([*of_bytes, decoders.Strip(" ", 1, 0)])
    return tokenizer


TOKENIZERS = {"byte level": train_tokenizer(), "byte fallback": byte_fallback()}


def answer_text(tokenizer: Tokenizer, prompt: list[int], answer: list[int], **given: Any) -> str:
    request = SimpleNamespace(
        sampling_params=SamplingParams(**given), request_id="r", prompt_token_ids=prompt
    )
    detokenizer = FastIncrementalDetokenizer(SimpleNamespace(_tokenizer=tokenizer), request)
    state: Any = SimpleNamespace(detokenizer=detokenizer, prompt_token_ids=prompt)
    keep_prompt_out(state, TokenBytes(tokenizer))
    detokenizer.update(answer, stop_terminated=False)
    return detokenizer.get_next_output_text(finished=True, delta=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_of_a_text_continues_with_the_rest(name: str, text: str) -> None:
    """The prompt's last character may be joined, if it is open; no other text of it comes back."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    own = TokenBytes(tokenizer)
    answer = tokenizer.encode("ab cd", add_special_tokens=False).ids
    for cut in range(1, len(ids) + 1):
        spelled = b"".join(own.of(token) for token in ids[:cut])
        rest = b"".join(own.of(token) for token in ids[cut:])
        whole = spelled.decode(errors="ignore")
        opened = spelled[len(whole.encode()) :]
        wanted = (opened + rest).decode() + tokenizer.decode([*ids, *answer])[len(text) :]
        got = answer_text(tokenizer, ids[:cut], [*ids[cut:], *answer])
        assert got.replace("▁", " ") == wanted.replace("▁", " "), (cut, spelled)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("own", ["x", "漢", "\ufffdx"])
def test_an_open_character_that_stays_open_is_no_part_of_the_answer(name: str, own: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("secret 漢", add_special_tokens=False).ids[:-1]
    answer = tokenizer.encode(own, add_special_tokens=False).ids
    assert answer_text(tokenizer, prompt, answer).replace("▁", " ").lstrip() == own


def test_special_tokens_behind_an_open_character_hide_nothing() -> None:
    tokenizer = TOKENIZERS["byte level"]
    end = tokenizer.token_to_id(EOS_TOKEN)
    prompt = tokenizer.encode("secret 漢", add_special_tokens=False).ids[:-1] + [end] * 40
    answer = tokenizer.encode("x", add_special_tokens=False).ids
    for skip in (True, False):
        text = answer_text(tokenizer, prompt, answer, skip_special_tokens=skip)
        assert "secret" not in text
        assert text.endswith("x")


def test_stop_strings_match_in_the_answer_alone() -> None:
    tokenizer = TOKENIZERS["byte level"]
    prompt = tokenizer.encode("The secret is here\ufffd", add_special_tokens=False).ids
    answer = tokenizer.encode(" no more", add_special_tokens=False).ids
    assert answer_text(tokenizer, prompt, answer, stop=["secret"]) == " no more"


# --------------------------------------------------------------------------------------- read ahead
@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors", "config.json"):
        (tmp_path / name).write_bytes(bytes(1000))
    return tmp_path


def test_all_weights_of_a_folder_are_advised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[str, int]] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length) == (0, 0)
        advised.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    files = read_ahead([str(model), "--max-num-seqs", "4"])
    assert [path.name for path in files] == ["model-1.safetensors", "model-2.safetensors"]
    assert advised == [(str(path), os.POSIX_FADV_WILLNEED) for path in files]


def test_others_are_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ([], ["--model", "x"], ["owner/model"], [str(model), "--load-format", "dummy"]):
        assert read_ahead(argv) == []
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(9000, 3999, "a group"))
    assert read_ahead([str(model)]) == []
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(9000, 4001, "a group"))
    assert len(read_ahead([str(model)])) == 2


# --------------------------------------------------------------------------------------- step stats
class Recorded:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.gauges: list[int] = []
        """Steps whose statistics of the scheduler were recorded."""
        self.logged: list[int] = []

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any, engine_idx: int
    ) -> None:
        self.steps.append(iteration_stats and iteration_stats.iteration_timestamp)
        if scheduler_stats is not None:
            self.gauges.append(scheduler_stats.step_counter)

    def log(self) -> None:
        self.logged = list(self.steps)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def manager(recorded: Recorded) -> DeferredStats:
    made: Any = StatLoggerManager.__new__(StatLoggerManager)
    made.stat_loggers = [recorded]
    engine: Any = SimpleNamespace(logger_manager=made)
    defer_stats(engine)
    assert isinstance(made, DeferredStats)
    return made


def step(number: int, running: int = 2, **fields: Any) -> tuple[SchedulerStats, IterationStats]:
    iteration = IterationStats()
    iteration.iteration_timestamp = number
    iteration.num_generation_tokens = running
    for name, value in fields.items():
        setattr(iteration, name, value)
    return SchedulerStats(num_running_reqs=running, step_counter=number), iteration


async def test_decode_steps_are_recorded_together(
    manager: DeferredStats, recorded: Recorded
) -> None:
    for number in range(5):
        manager.record(*step(number))
    assert not recorded.steps
    await asyncio.sleep(0.5)
    assert recorded.steps == [0, 1, 2, 3, 4]
    assert recorded.gauges == [4]
    manager.record(*step(5))
    await asyncio.sleep(0.5)
    assert recorded.steps[-1] == 5


async def test_steps_without_statistics_of_the_scheduler_wait_too(
    manager: DeferredStats, recorded: Recorded
) -> None:
    manager.record(*step(0))
    for number in (1, 2):
        manager.record(None, step(number)[1])
    assert not recorded.steps
    manager.flush()
    assert (recorded.steps, recorded.gauges) == ([0, 1, 2], [0])


@pytest.mark.parametrize(
    "fields",
    [
        {"spec_decoding_stats": object()},
        {"kv_connector_stats": {}},
        {"kv_cache_eviction_events": [object()]},
        {"prefix_cache_stats": PrefixCacheStats(requests=1)},
    ],
)
async def test_what_is_counted_of_the_scheduler_is_recorded(
    manager: DeferredStats, recorded: Recorded, fields: dict[str, Any]
) -> None:
    for number in range(3):
        scheduler, iteration = step(number)
        manager.record(replace(scheduler, **(fields if number == 1 else {})), iteration)
    manager.flush()
    assert recorded.gauges == [1, 2]


async def test_each_engine_has_its_gauges(manager: DeferredStats, recorded: Recorded) -> None:
    for number, engine in enumerate((0, 0, 1, 1)):
        manager.record(*step(number), None, engine)
    manager.flush()
    assert recorded.gauges == [1, 3]


@pytest.mark.parametrize(
    "last",
    [
        {"finished_requests": [object()]},
        {"time_to_first_tokens_iter": [0.1]},
        {"num_preempted_reqs": 1},
        {"running": 0},
    ],
)
async def test_a_start_or_an_end_is_seen_at_once(
    manager: DeferredStats, recorded: Recorded, last: dict[str, Any]
) -> None:
    manager.record(*step(0))
    manager.record(*step(1, **last))
    assert recorded.steps == [0, 1]


async def test_a_step_without_statistics_of_tokens_is_seen_at_once(
    manager: DeferredStats, recorded: Recorded
) -> None:
    manager.record(step(0)[0], None)
    assert recorded.gauges == [0]


async def test_the_log_has_every_step(manager: DeferredStats, recorded: Recorded) -> None:
    manager.record(*step(0))
    manager.log()
    assert recorded.logged == [0]


async def test_many_steps_do_not_pile_up(manager: DeferredStats, recorded: Recorded) -> None:
    for number in range(100):
        manager.record(*step(number))
    assert len(recorded.steps) == 64


def test_an_engine_without_statistics_stays_as_it_is() -> None:
    engine: Any = SimpleNamespace(logger_manager=None)
    defer_stats(engine)
    assert engine.logger_manager is None
