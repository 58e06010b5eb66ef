"""What adapter_config.json may ask for, and how a refusal names it."""

from __future__ import annotations

from typing import Any

import pytest

from rbln_backend.errors import AdapterError
from rbln_backend.lora.adapter_files import check_config

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q"]}


def test_what_peft_writes_by_default_passes() -> None:
    defaults: dict[str, Any] = {
        "alpha_pattern": {},
        "rank_pattern": {},
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layer_replication": None,
        "lora_bias": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": True,
        "trainable_token_indices": None,
    }
    check_config(PLAIN | defaults, 8)
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


def test_something_else_than_an_object_is_refused() -> None:
    with pytest.raises(AdapterError, match="no object"):
        check_config([PLAIN], 8)
