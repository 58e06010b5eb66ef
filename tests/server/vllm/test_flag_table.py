"""Every flag of vLLM's parser is honoured, translated, checked or refused, in one list each."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.frontend import LaunchError
from server.settings import ServerSettings
from server.vllm.flag_table import (
    CHECKED_FLAGS,
    FULFILLED_FLAGS,
    HONOURED_FLAGS,
    REFUSED_FLAGS,
    RENAMED_FLAGS,
)

pytestmark = pytest.mark.engine

HONOURED = [name for names in HONOURED_FLAGS.values() for name in names]
LISTS = (HONOURED, CHECKED_FLAGS, REFUSED_FLAGS, RENAMED_FLAGS, FULFILLED_FLAGS)


def test_every_flag_of_vllm_is_in_one_list() -> None:
    from server.vllm.flags import serve_parser

    parser = serve_parser()
    flags = {action.dest for action in parser._actions if action.option_strings}
    listed = [name for names in LISTS for name in names]
    own = ServerSettings.model_fields.keys() - set(listed)
    assert sorted(listed) == sorted(set(listed)), "in two lists"
    assert flags - own - set(listed) == set(), "server/vllm/flag_table.py"
    assert set(listed) - flags == set(), "no flag of this vLLM"


def test_a_refused_flag_names_what_to_use(tmp_path: Path) -> None:
    from server.vllm.flags import parse_arguments

    with pytest.raises(LaunchError, match=r"--cpu-offload-gb .*use --tensor-parallel-size"):
        parse_arguments([str(tmp_path), "--cpu-offload-gb", "4"], ServerSettings())
