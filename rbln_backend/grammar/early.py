"""Reads what grammars need of the tokenizer in the engine's first pause, not for the first one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rbln_backend.grammar.backend import PinnedXgrammar

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""Idle time after which the engine counts as pausing."""
_START_S = 1.0
"""Lets a start end first: front end, self-test and an answer to whoever waits."""


class EarlyVocabulary:
    """Has a backend make its compiler of llguidance's dialect while no request runs.

    The interpreter's lock is held meanwhile, by llguidance 0.4 s for 32,000 tokens and 0.9 s for
    128,256, and 0.5 s to read a tokenizer of 128,256: the first grammar would stop every stream of
    the engine. If there is no pause before the first grammar, it still does.
    """

    def __init__(self, backend: PinnedXgrammar | None, is_busy: Callable[[], bool]) -> None:
        """``is_busy()`` is called from another thread; None for an engine without grammars."""
        self._is_busy = is_busy
        self._is_closed = threading.Event()
        if backend is not None:
            name = "grammar-vocabulary"
            threading.Thread(target=self._run, args=(backend,), name=name, daemon=True).start()

    def close(self) -> None:
        """Begin no reading any more."""
        self._is_closed.set()

    def _run(self, backend: PinnedXgrammar) -> None:
        was_busy = True
        self._is_closed.wait(_START_S)
        while not self._is_closed.wait(_PAUSE_S):
            is_busy = self._is_busy()
            if not (is_busy or was_busy):
                _read(backend)
                return
            was_busy = is_busy


def _read(backend: PinnedXgrammar) -> None:
    try:
        backend.lark_compiler()
    except (ValueError, RuntimeError, TypeError, OSError) as error:
        # A tokenizer that llguidance cannot read: requests with a grammar get the reason.
        logger.debug("no grammar can be compiled: %s", error)
