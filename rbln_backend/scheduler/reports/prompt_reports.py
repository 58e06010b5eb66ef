"""All reports about prompts of a scheduler: progress while they are read, then first tokens."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend.reporting.metrics_board import MetricsBoard
from rbln_backend.scheduler.reports.first_tokens import FirstTokens
from rbln_backend.scheduler.reports.prompt_progress import ProgressReports
from rbln_backend.vllm_compat.surface import EngineCoreOutputs, Request, SchedulerOutput


class PromptReports:
    """Calls ``FirstTokens`` and ``ProgressReports``."""

    def __init__(self, board: MetricsBoard) -> None:
        self._first_tokens = FirstTokens(board)
        self._progress = ProgressReports()

    def scheduled(self, prefill: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Note the requests of a ``prefill`` step."""
        self._first_tokens.scheduled(prefill, requests)
        self._progress.scheduled(prefill, requests)

    def report(self, ran: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Report after each step, which may add to its ``outputs``."""
        self._first_tokens.report()
        self._progress.report(ran, outputs)
