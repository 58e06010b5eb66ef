"""Which adapter lies where: no slot twice, none taken from a request, and an error when full."""

from __future__ import annotations

import random

import pytest

from rbln_backend.errors import AdapterError
from rbln_backend.lora.slots import Slots


def test_slots_are_given_out_once_and_come_back() -> None:
    slots = Slots(2)
    assert {slots.reserve(7, (), passing=False), slots.reserve(9, (), passing=False)} == {0, 1}
    with pytest.raises(AdapterError, match=r"all 2 adapter slots are taken \(--max-loras 2\)"):
        slots.reserve(11, (), passing=False)
    freed = slots[7]
    assert slots.release(7)
    assert not slots.release(7)
    assert slots.reserve(11, (), passing=False) == freed
    assert set(slots.as_dict()) == {9, 11}


def test_only_adapters_that_requests_brought_make_room_the_oldest_first() -> None:
    slots = Slots(3)
    for number in (1, 2, 3):
        slots.reserve(number, (), passing=number != 1)
    slots.touch(2)
    slots.reserve(4, (), passing=True)
    assert set(slots.as_dict()) == {1, 2, 4}
    with pytest.raises(AdapterError):
        slots.reserve(5, (2, 4), passing=True)
    slots.keep(2)
    slots.reserve(5, (), passing=True)
    assert set(slots.as_dict()) == {1, 2, 5}


def test_random_histories_keep_every_promise() -> None:
    rng = random.Random(3)
    for _ in range(200):
        count = rng.randint(1, 4)
        slots, added, in_use = Slots(count), set(), set()
        for number in range(1, 60):
            before = slots.as_dict()
            passing = rng.random() < 0.5
            try:
                slots.reserve(number, in_use, passing=passing)
            except AdapterError:
                assert len(before) == count
                assert set(before) <= added | in_use
            held = slots.as_dict()
            assert len(set(held.values())) == len(held) <= count
            assert set(held.values()) <= set(range(count))
            gone = before.keys() - held.keys()
            assert not gone & (added | in_use)
            if number in held and not passing:
                added.add(number)
            in_use = {n for n in held if rng.random() < 0.3}
            for n in held:
                if rng.random() < 0.1 and n not in in_use:
                    assert slots.release(n)
                    added.discard(n)
