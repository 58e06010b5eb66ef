"""The list of vLLM's flags, and the check of a command line against them."""

from __future__ import annotations

import pytest

from server.commands.flags import (
    UnknownFlagError,
    nearest,
    require_known,
    vllm_flags,
)

KNOWN = {"--max-num-seqs", "--max-num-batched-tokens", "--hf-overrides", "--no-async", "-tp", "-cc"}


def test_the_list_is_that_of_the_installed_vllm() -> None:
    from server.vllm.flags import serve_parser

    assert vllm_flags() == set(serve_parser()._option_string_actions), "run `make flags`"


@pytest.mark.parametrize(
    "words",
    [
        "m --max-num-seqs 4",
        "m --max_num_seqs=4",
        # A prefix of one flag alone, which vLLM's parser accepts.
        "m --max-num-s 4",
        "m --hf-overrides.rope.theta 1 --hf-overrides.archs+ x",
        "m --no-async -tp2 -tp=2 -O3 -O.mode 3 -cc.mode 3",
        "m --max-num-seqs -1 -- --anything",
    ],
)
def test_what_vllm_accepts_is_known(words: str) -> None:
    require_known(words.split(), KNOWN)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("m --max-num-sequs 4", "--max-num-sequs: unknown flag; did you mean --max-num-seqs?"),
        ("m --max-num 4", "--max-num: ambiguous flag; could be --max-num-batched-tokens, --max-"),
        ("m --ours-too 4", "did you mean --ours-two?"),
        ("m --zzz", "--zzz: unknown flag; --help lists the flags"),
        ("m -x 3", "-x: unknown flag"),
    ],
)
def test_what_it_does_not_accept_is_refused(words: str, message: str) -> None:
    with pytest.raises(UnknownFlagError) as refused:
        require_known(words.split(), KNOWN, ["--ours-two"])
    assert message in str(refused.value)


def test_values_with_spaces_are_no_flags() -> None:
    require_known(["m", "--hf-overrides", "--not a flag"], KNOWN)


def test_the_nearest_word_or_nothing() -> None:
    assert nearest("srve", ["serve", "check"]) == "; did you mean serve?"
    assert nearest("xyz", ["serve", "check"]) == ""
