"""Draft settings of a request in vLLM's extra arguments."""

import pytest

from rbln_backend.speculation.drafter import EXTRA_ARGS, DraftSettings


def test_drafts_are_on_by_default() -> None:
    for extra_args in (None, {}, {EXTRA_ARGS: None}):
        assert DraftSettings.of(extra_args) == DraftSettings()


def test_settings_are_read() -> None:
    given = {EXTRA_ARGS: {"off": True, "prediction": [3, 4], "key": "ours"}, "other": 1}

    assert DraftSettings.of(given) == DraftSettings(off=True, prediction=(3, 4), key="ours")


@pytest.mark.parametrize("written", ["x", 5, 1.5, [1], [], None])
def test_anything_but_a_mapping_counts_as_absent(written: object) -> None:
    assert DraftSettings.of({EXTRA_ARGS: written}) == DraftSettings()
