"""Tokens that JSON forbids."""

from __future__ import annotations

from rbln_backend.grammar.json_compiler import tokens_without_controls


def test_tokens_with_control_characters_are_known() -> None:
    tokens = [b"a", b"\x00", b"b\n", b"\tc", b"", b"\x7f", "é".encode()] * 9
    for allowed in (b"\n", b"\n\r\t"):
        bits = tokens_without_controls(tokens, allowed)
        assert bits.nbytes == 8
        for index, token in enumerate(tokens):
            is_legal = all(byte >= 32 or byte in allowed for byte in token)
            assert bool(bits[index // 32] >> (index % 32) & 1) is is_legal
