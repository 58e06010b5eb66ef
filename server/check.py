"""`rbln-serve check`: whether a model can run here and how, without reading its weights.

Both refuse the same models for the same reasons, see `server.offline`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from server.frontend import LaunchError
from server.offline import answers_alone_on_stdout, ask_platform
from server.settings import ServerSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from rbln_backend.model_report import ModelReport

_LABEL_WIDTH = 16


def check(argv: Sequence[str], settings: ServerSettings, *, as_json: bool) -> int:
    """Print the verdict on vLLM's `argv`; return 0, 1 (cannot run) or 2 (wrong command line)."""
    with answers_alone_on_stdout() as out:
        try:
            report = ask_platform(argv, settings, _inspect)
        except LaunchError as error:
            return _refuse(error, out, as_json=as_json)
        if as_json:
            out.write(json.dumps({"ok": True, "reason": None, **report.to_dict()}) + "\n")
        else:
            out.write("This model can run.\n")
            out.writelines(f"  {name:<{_LABEL_WIDTH}} {value}\n" for name, value in report.lines())
    return 0


def _refuse(error: LaunchError, out: TextIO, *, as_json: bool) -> int:
    if as_json:
        out.write(json.dumps({"ok": False, "reason": str(error)}) + "\n")
    elif error.exit_code == 1:
        out.write(f"This model cannot run: {error}\n")
    else:
        sys.stderr.write(f"rbln-serve check: error: {error}\n")
    return error.exit_code


def _inspect(platform: type[Any], config: VllmConfig) -> ModelReport:
    report: ModelReport = platform.inspect_model(config)
    _check_tokenizer(config.model_config)
    return report


def _check_tokenizer(model_config: ModelConfig) -> None:
    if model_config.skip_tokenizer_init:
        return
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        cached_tokenizer_from_config(model_config)
    except Exception as error:
        # Each tokenizer library raises errors of its own, and all mean the same here.
        text = f"the tokenizer cannot be loaded: {type(error).__name__}: {error}"
        raise LaunchError(" ".join(text.split())) from error
