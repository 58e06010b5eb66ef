"""``rbln_backend``: what ``torch.compile`` hands its graphs to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from rebel import log
from rebel.core import binaries
from rebel.core.axes import check_axes
from rebel.core.inputs import (
    attributes,
    check_contiguous,
    check_kv,
    check_marks,
    check_weights,
    classify,
    computed_of_weights,
)
from rebel.core.options import check_options, describe_options
from rebel.core.routing import check_routing
from rebel.core.runtime import Runtime
from rebel.core.trace import Calls, check_metadata, check_names, describe, on_host
from rebel.device_info import target_name
from rebel.rules import require
from rebel.settings import SETTINGS
from torch import fx
from torch._dynamo import register_backend

_numbers = itertools.count()


def rbln_backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Runtime:
    """Compile the graph, or take its binary, and load it onto the device.

    Raises RuleBrokenError where a strict rule is broken, RuntimeError where there is no device, or
    not enough memory on it.
    """
    options = dict(kwargs.get("options") or {})
    context = options.get("compile_context")
    check_options(options)
    require("no_grad", not torch.is_grad_enabled(), "gradients are enabled")
    check_metadata(graph_module)
    check_names(graph_module)
    check_axes(graph_module)
    check_routing(graph_module)
    inputs = classify(graph_module, example_inputs, context)
    check_kv(graph_module, inputs)
    check_weights(graph_module, inputs, context)
    check_contiguous(graph_module, inputs)
    check_marks(graph_module, inputs)
    if target_name() is None:
        raise RuntimeError("no NPU is here to compile for; RBLN_FORCE_NPU_NAME may name one")
    calls = Calls(graph_module)
    module = on_host(graph_module)
    key = binaries.get_key(module.code, inputs, options)
    hit = binaries.find(key, options)
    log.write(
        "compile",
        graph=next(_numbers),
        key=key,
        hit=hit,
        npu=target_name(),
        options=describe_options(options),
        inputs=[given.describe() for given in inputs],
        attributes=[[name, describe(value)] for name, value in attributes(graph_module)],
        of_weights=computed_of_weights(graph_module, inputs),
        linear_ranks=sorted(calls.linear_ranks),
        sdk_ops=calls.sdk_ops,
        ops=dict(sorted(calls.others.items())),
        rank=log.environment().get("LOCAL_RANK"),
    )
    if not hit:
        time.sleep(SETTINGS.compile_seconds)
        binaries.store(key, options)
    runtime = Runtime(module, inputs, context, options)
    if "_runtime_holder" in options:
        options["_runtime_holder"].append(runtime)
    return runtime


register_backend(name="rbln", compiler_fn=rbln_backend)
