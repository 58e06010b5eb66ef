"""`rbln-serve replay`: verify an audit log, and run its answers again.

The engine is that of the first chosen answer, or of the command line. No port is opened. Exit
codes: 0 the chain is whole and all tokens are the same, 1 otherwise, 2 an invalid command line.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.audit.log_files import AuditLogError
from server.audit.replay_report import LoggedAnswer, ReplayReport, chosen_answers, verified
from server.audit.verification import files_of
from server.frontend import LaunchError
from server.settings import ServerSettings, export_log_level

if TYPE_CHECKING:
    from server.vllm.auditing.replay import Replay

_STOP_S = 10.0
_CONCURRENCY = 64


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Flags of the command: numbers of the records to replay (none: all), and what to print."""

    chosen: frozenset[int] = frozenset()
    verify_only: bool = False
    as_json: bool = False


def replay(
    path: Path, argv: Sequence[str], settings: ServerSettings, options: ReplayOptions
) -> int:
    """Verify and replay the log at `path`; return the exit code.

    `argv` is the engine's command line, empty for the recorded one.
    """
    try:
        files = files_of(path)
        report = verified(files)
    except (AuditLogError, OSError) as error:
        sys.stderr.write(f"rbln-serve replay: {error}\n")
        return 2
    found = chosen_answers(files, options.chosen)
    first = None if options.verify_only else next(found, None)
    if first is not None:
        try:
            _run(argv or first.header["argv"], settings, chain([first], found), report)
        except LaunchError as error:
            sys.stderr.write(f"rbln-serve replay: {error}\n")
            return error.exit_code
    if options.as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(report)) + "\n")
    else:
        lines = [*report.lines(), *([] if first is None else [report.summary()])]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0 if report.is_clean else 1


def replay_settings(argv: Sequence[str], settings: ServerSettings) -> ServerSettings:
    """Return the settings of a server's command line for its replay, which records nothing.

    Adapters are compared by their digests, so that the names of their base models do not matter.
    """
    adapts = any(word.replace("_", "-") == "--enable-lora" for word in argv)
    names = ("*",) if adapts else settings.lora_base_names
    return settings.model_copy(
        update={"audit_log": None, "data_dir": None, "lora_base_names": names}
    )


def _run(
    argv: Sequence[str],
    settings: ServerSettings,
    found: Iterator[LoggedAnswer],
    report: ReplayReport,
) -> None:
    """Start the engine and replay the answers on it. Raises `LaunchError`."""
    import uvloop

    from rbln_backend.host.process_life import outlive_readers
    from server.host.run_folder import run_folder

    outlive_readers()
    export_log_level(settings)
    private = replay_settings(argv, settings)
    if private.engine_start == "forkserver":
        from server.engine.process import start_forkserver

        start_forkserver()
    with (
        run_folder(private.run_root) as run_dir,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_replay_all(argv, private, run_dir, found, report))


async def _replay_all(
    argv: Sequence[str],
    settings: ServerSettings,
    run_dir: Path,
    found: Iterator[LoggedAnswer],
    report: ReplayReport,
) -> None:
    from server.engine.launch import VllmLauncher

    launcher = VllmLauncher(argv, settings, run_dir)
    try:
        engine = await launcher.launch()
    except LaunchError:
        await launcher.abandon()
        raise
    try:
        from server.vllm.auditing.provenance import Provenance
        from server.vllm.auditing.replay import Replay

        provenance = Provenance(engine.client.vllm_config, argv, launcher.versions(), run_dir)
        await asyncio.to_thread(provenance.check)
        work = LogReplay(
            Replay(engine.client, engine.frontend.adapters), provenance.fields(), report
        )
        await work.run(found)
    finally:
        await engine.shutdown(_STOP_S)


class LogReplay:
    """Replays the answers of a log on one engine and fills a report."""

    def __init__(self, replay: Replay, identity: Mapping[str, Any], report: ReplayReport) -> None:
        """`identity` has the fields of a header for this engine."""
        self._replay, self._identity, self._report = replay, identity, report
        self._header: Mapping[str, Any] | None = None

    async def run(self, found: Iterator[LoggedAnswer]) -> None:
        """Replay answers, many at once: none of them depends on the others in its batch."""
        running: set[asyncio.Task[None]] = set()
        for answer in found:
            if answer.header is not self._header:
                self._header = answer.header
                self._compare(answer.header)
            running.add(asyncio.create_task(self._one(answer)))
            if len(running) >= _CONCURRENCY:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        if running:
            await asyncio.gather(*running)

    async def _one(self, answer: LoggedAnswer) -> None:
        from server.vllm.auditing.replay import ReplayError

        place, record, _ = answer
        where = {"file": str(place.file), "line": place.line, "seq": record["seq"]}
        try:
            difference = await self._replay.run(record)
        except ReplayError as error:
            self._report.not_replayed.append({**where, "reason": str(error)})
            return
        except Exception as error:  # noqa: BLE001
            # The boundary to the engine: its failure concerns one answer.
            reason = f"the engine failed: {type(error).__name__}: {error}"
            self._report.not_replayed.append({**where, "reason": reason})
            return
        if difference is None:
            self._report.same += 1
            return
        replayed = difference.replayed
        self._report.different.append(
            {
                **where,
                "answer_id": record["answer_id"],
                "position": difference.position,
                "tokens": len(record["output"]),
                "recorded": difference.recorded._asdict(),
                "replayed": None if replayed is None else replayed._asdict(),
            }
        )

    def _compare(self, header: Mapping[str, Any]) -> None:
        """Report the fields of a header that differ from this engine's."""
        from server.vllm.auditing.provenance import COMPARED

        for name in COMPARED:
            recorded, here = header.get(name), self._identity.get(name)
            entry = {"field": name, "recorded": recorded, "here": here}
            if recorded != here and entry not in self._report.engine:
                self._report.engine.append(entry)
