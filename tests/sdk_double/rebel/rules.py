"""The strict rules: what the double refuses, and whose word each is.

``vendor``: the vendor's wheels keep it in every run of ``tests/vendor``, and the rule has something
to look at there. ``ours``: written from documents or caution; their runs never exercise it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rebel import log
from rebel.settings import SETTINGS


@dataclass(frozen=True)
class Rule:
    """A rule for the caller, and the source that documents it."""

    says: str
    source: Literal["vendor", "ours"]


RULES = {
    "aliases": Rule("two inputs of a step are not in the same memory", "vendor"),
    "axes": Rule(
        "what is computed of queries, keys and values has axes of batch and sequence", "vendor"
    ),
    "blocks": Rule(
        "a block is 512 to 16384, a power of two; a chunk divides it; 16 bits number it",
        "vendor",
    ),
    "cache": Rule("a binary is loaded by the rank that compiled it", "vendor"),
    "contiguous": Rule("weights are contiguous", "vendor"),
    "devices": Rule(
        "a rank opens devices that its environment names, and no other rank's", "vendor"
    ),
    "kv": Rule("KV lives on the device: what the host writes there is not seen", "vendor"),
    "marks": Rule(
        "what a module owns is marked as static, on the tensor and on its placeholder, which has "
        "its source's name; a cache and what a step or a request brings is not",
        "vendor",
    ),
    "memory": Rule(
        "device memory is finite: weights, KV, and 1 GiB for each graph with KV", "vendor"
    ),
    "meta": Rule("every node that returns something has an example_value", "vendor"),
    "names": Rule("an operator is named without the overload `default`", "vendor"),
    "no_grad": Rule("a graph is compiled with gradients off", "vendor"),
    "options": Rule("option keys are known ones, of the known types", "vendor"),
    "positions": Rule("the tokens of a decode step lie within the block table", "vendor"),
    "routing": Rule(
        "experts are chosen by one chain of operators, which ends in the table of their weights",
        "vendor",
    ),
    "rows": Rule(
        "CR13's decode kernel reads of a block column as many rows as reach it: longest first",
        "ours",
    ),
    "runtime": Rule(
        "no runtime without a device; compile_only gives one that computes nothing", "vendor"
    ),
    "schema": Rule("an SDK op gets all its arguments, in the dtypes and ranks of 0.12", "vendor"),
    "static": Rule("KV is a static tensor on meta, or a tensor of the device", "vendor"),
    "weights": Rule(
        "among graphs of one KV cache a weight has one name, and a name one weight",
        "vendor",
    ),
    "weights_fixed": Rule(
        "a weight, or what is marked as one, goes to the device once: later writes are not seen, "
        "and spoil what is there",
        "ours",
    ),
}


class RuleBrokenError(RuntimeError):
    """A strict rule of the double was broken; the message begins with the rule's name."""


def is_on(rule: str) -> bool:
    """Return True if ``rule`` is enforced in this process."""
    assert rule in RULES, rule
    return rule not in SETTINGS.off


def require(rule: str, kept: bool, message: str) -> None:
    """Raise RuleBrokenError with ``message`` unless ``kept`` or switched off."""
    if kept or not is_on(rule):
        return
    log.write("broken", rule=rule, message=message)
    raise RuleBrokenError(f"SDK double, rule '{rule}' ({RULES[rule].says}): {message}")


def table() -> str:
    """The rules as lines of a table: name, whose, what it says."""
    return "\n".join(f"{name:14} {rule.source:7} {rule.says}" for name, rule in RULES.items())
