"""What adapter_config.json may ask for, and how a refusal names it."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_backend.errors import AdapterError
from rbln_backend.lora.adapter_files import check_config
from rbln_backend.lora.slots import MatrixStack, SlotMask, Slots, SlotStack

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q"]}


def test_what_peft_writes_by_default_passes() -> None:
    defaults = {"alpha_pattern": {}, "rank_pattern": {}, "init_lora_weights": True}
    defaults |= dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_dora"), False)
    nothing = ("layer_replication", "modules_to_save", "trainable_token_indices")
    check_config(PLAIN | defaults | dict.fromkeys(nothing) | {"use_rslora": True}, 8)
    check_config(PLAIN | {"init_lora_weights": "gaussian", "lora_alpha": 0.5}, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 16}, "r is 16, and --max-lora-rank is 8"),
        ({"r": "8"}, "r is '8', not a positive integer"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    ],
)
def test_the_field_and_its_value_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        check_config(PLAIN | change, 8)
    with pytest.raises(AdapterError, match="no object"):
        check_config([PLAIN | change], 8)


# -------------------------------------------------------------------------------------------- slots
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


# --------------------------------------------------------------------------------------- slot stack
SLOTS, RANK, INPUTS, OUTPUTS = 3, 8, 20, (12, 4, 4)


def stack_of(outputs: Sequence[int], dtype: torch.dtype = torch.float32) -> MatrixStack:
    sizes = {"slots": SLOTS, "rank": RANK, "inputs": INPUTS}
    return MatrixStack.on_device(**sizes, outputs=outputs, dtype=dtype, resident=lambda x: x)


def matrices(rank: int, outputs: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    down = [torch.randn(rank, INPUTS) for _ in outputs]
    return down, [torch.randn(size, rank) for size in outputs]


@pytest.mark.parametrize("outputs", [OUTPUTS, (16,)])
@pytest.mark.parametrize(("rows", "length"), [(5, 1), (1, 7), (4, 3)])
def test_each_row_has_its_own_adapter(outputs: Sequence[int], rows: int, length: int) -> None:
    stack, mask = stack_of(outputs), SlotMask(SLOTS, RANK, torch.float32)
    adapters = {0: matrices(8, outputs), 2: matrices(3, outputs)}
    for slot, (a, b) in adapters.items():
        stack.write(slot, stack.image(a, b))
    slots = [(0, -1, 2, 1)[n % 4] for n in range(rows)]
    chosen = mask.allocate(rows)
    mask.fill(chosen, slots)
    x, y = torch.randn(rows, length, INPUTS), torch.randn(rows, length, sum(outputs))
    expected = y.clone()
    for row, slot in enumerate(slots):
        if slot in adapters:
            parts = [x[row] @ a.T @ b.T for a, b in zip(*adapters[slot], strict=True)]
            expected[row] += torch.cat(parts, dim=-1)
    torch.testing.assert_close(stack.add(y, x, chosen), expected)
    # Experts have rows of tokens.
    flat = stack.add(y.flatten(0, 1), x.flatten(0, 1), chosen)
    torch.testing.assert_close(flat, expected.flatten(0, 1))


def test_a_slot_keeps_nothing_of_the_last_adapter() -> None:
    stack = stack_of(OUTPUTS)
    (one, other), small = (matrices(RANK, OUTPUTS) for _ in range(2)), matrices(2, OUTPUTS)
    stack.write(0, stack.image(*one))
    stack.write(1, stack.image(*other))
    kept = [tensor.clone() for tensor in stack.homes]
    stack.write(1, stack.image(*small))
    fresh = stack_of(OUTPUTS)
    fresh.write(0, fresh.image(*one))
    fresh.write(1, fresh.image(*small))
    assert all(map(torch.equal, stack.homes, fresh.homes))
    stack.write(1, None)
    stack.write(1, stack.image(*other))
    assert all(map(torch.equal, stack.homes, kept))
    stack.write(0, None)
    stack.write(1, None)
    assert not any(tensor.any() for tensor in stack.homes)


def test_values_beyond_the_dtype_are_refused() -> None:
    """Multiplied by the mask's zeros, infinity would be NaN in the rows of others."""
    a, b = matrices(2, (4,))
    b[0][1, 1] = 1e6
    for stack in (
        stack_of((4,), torch.float16),
        SlotStack.allocate(slots=1, rank=2, inputs=INPUTS, outputs=(4,), dtype=torch.float16),
    ):
        with pytest.raises(AdapterError, match="has values beyond float16"):
            stack.image(a, b)
