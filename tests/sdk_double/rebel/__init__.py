"""A stand-in of the RBLN SDK 0.12 that computes on the CPU and is strict about how it is called.

It plays what the open code of vllm_rbln and torch_rbln 0.12.0 asks of ``rebel``; their wheels run
over it (``tests/vendor``). It says nothing about an NPU's numbers, speed or memory. Settings:
``settings.py``; strict rules: ``rules.py``; every call is a line of a log: ``log.py``.
"""

from __future__ import annotations

from rebel import ccl, log, ops
from rebel.compile_context import CompileContext
from rebel.core.offline import compile
from rebel.device_info import get_npu_name
from rebel.random import manual_seed
from rebel.settings import SETTINGS

__version__ = SETTINGS.version

__all__ = ["CompileContext", "__version__", "compile", "get_npu_name", "manual_seed", "ops"]

ccl.replace()
log.write_environment("import")
