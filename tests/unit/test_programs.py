"""Stored programs from elsewhere: what is not exactly a valid program is refused with the reason.

``tests/forged_bundles.py`` makes thousands of such programs; here each rule has its own.
"""

import gc
import json
import operator
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import rbln_backend.devices.emulated.ops
import rbln_backend.layers.attention_ops  # noqa: F401
from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.graphs import program
from rbln_backend.graphs.call_list import CallList
from rbln_backend.graphs.operators import NAMES, get_schema, get_target, operator_name
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import as_meta, check_shapes

OPS = torch.ops.rbln_emulator
# Of ``sample``: placeholders, view, linear, split, getitem, cast, setitem, output.
VIEW, LINEAR, SPLIT, ITEM, CAST, SET = range(2, 8)


def sample() -> Program:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    rows = graph.call_method("view", (x, (3, 4)))
    hidden = graph.call_function(OPS.linear.default, (rows, weight, None, 8))
    halves = graph.call_method("split", (hidden, [4, 4]), {"dim": -1})
    first = graph.call_function(operator.getitem, (halves, 0))
    cast = graph.call_method("to", (first, torch.float32))
    graph.call_function(operator.setitem, (cast, (Ellipsis, slice(0, 1, None)), 0.5))
    graph.output((cast,))
    return Program(graph, ("input:x", "packed:w"))


def written(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def edited(node: int, change: dict[str, Any]) -> bytes:
    content = json.loads(sample().to_bytes())
    content["nodes"][node] |= change
    return written(content)


def with_argument(node: int, place: int, value: Any) -> bytes:
    content = json.loads(sample().to_bytes())
    content["nodes"][node]["args"]["tuple"][place] = value
    return written(content)


def refusal(data: bytes) -> str:
    with pytest.raises(CorruptArtifactError) as refused:
        Program.from_bytes(data)
    return str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        *"torch.load torch.from_file builtins.eval operator.attrgetter".split(),
        *"operator.call method.apply_ method.numpy method.__class__".split(),
        "op.aten::from_file.default",
        "op.rbln_channels::all_reduce.default",
        "functional.__class__",
        "call_module",
        "",
    ],
)
def test_an_operator_off_the_list_is_refused(name: str) -> None:
    assert "is not allowed" in refusal(edited(VIEW, {"op": name}))


def test_an_operator_that_does_not_exist_is_refused() -> None:
    for name in (
        "op.rbln_emulated_ops::missing.default",
        "op.rbln_emulator::linear.__class__",
        "op.rbln_custom_ops::custom_moe_glu.out",
    ):
        assert "does not exist here" in refusal(edited(LINEAR, {"op": name}))


@pytest.mark.parametrize(
    "keyword",
    [
        "**(__import__('os').system('id') and {} or {}))  #",
        "out",
        "",
        "dim\n",
        "__class__",
        "x" * 99,
    ],
)
def test_a_keyword_that_is_no_plain_name_is_refused(keyword: str) -> None:
    """As source text, the first would be code."""
    for node in (VIEW, LINEAR, SPLIT, ITEM):
        assert "has no argument" in refusal(edited(node, {"kwargs": {keyword: None}}))
    assert "has no argument 'dim'" in refusal(edited(LINEAR, {"kwargs": {"dim": None}}))


def test_an_argument_of_another_type_than_the_schema_has_is_refused() -> None:
    wrong = (
        (LINEAR, 3, "8"),
        (LINEAR, 3, True),
        (LINEAR, 3, None),
        (LINEAR, 3, {"node": 0}),
        (LINEAR, 0, 3),
        (LINEAR, 2, "silu"),
    )
    for node, place, value in wrong:
        assert " takes " in refusal(with_argument(node, place, value)), (node, place, value)


def test_a_call_of_a_python_callable_on_no_result_is_refused() -> None:
    """Texts and sequences have methods and operators, too."""
    for node, place, value in ((VIEW, 0, "x"), (SPLIT, 0, None), (CAST, 0, [1])):
        reason = refusal(with_argument(node, place, value))
        assert "takes the result of a node" in reason, (node, place, value)
    text = {"op": "operator.mul", "args": {"tuple": [{"node": 0}, "x"]}}
    assert "takes results of nodes and numbers alone" in refusal(edited(CAST, text))
    text = {"op": "operator.getitem", "args": {"tuple": ["x", {"node": 0}]}}
    assert "takes results of nodes and numbers alone" in refusal(edited(CAST, text))


@pytest.mark.parametrize("name", ["cpu", "meta", "cuda:0"])
def test_a_device_is_not_named_by_a_text(name: str) -> None:
    assert "takes a device as such" in refusal(with_argument(CAST, 1, name))
    named = {"kwargs": {"device": name}}
    assert "takes a device as such" in refusal(edited(CAST, named))


def test_too_few_and_too_many_arguments_are_refused() -> None:
    arguments = json.loads(sample().to_bytes())["nodes"][LINEAR]["args"]["tuple"]
    fewer, more = {"tuple": arguments[:-1]}, {"tuple": [*arguments, None]}
    assert "needs out_features" in refusal(edited(LINEAR, {"args": fewer}))
    assert "takes 4 arguments by position, got 5" in refusal(edited(LINEAR, {"args": more}))
    twice = {"kwargs": {"out_features": 8}}
    assert "takes out_features once" in refusal(edited(LINEAR, twice))
    one = {"args": {"tuple": [{"node": SPLIT}]}}
    assert "takes 2 operands, got 1" in refusal(edited(ITEM, one))
    assert "takes 2 operands, got 3" in refusal(edited(ITEM, {"kwargs": {"c": 1}}))


@pytest.mark.parametrize("node", [-1, LINEAR, LINEAR + 1, 10**9, True, "0", 1.0, None, [0]])
def test_a_reference_to_no_earlier_node_is_refused(node: Any) -> None:
    reason = refusal(with_argument(LINEAR, 0, {"node": node}))
    assert "is not the number of an earlier node" in reason


def test_a_result_that_is_none_cannot_be_used() -> None:
    content = json.loads(sample().to_bytes())
    content["nodes"][-1]["args"]["tuple"][0]["tuple"] = [{"node": SET}]
    assert f"node {SET} has no result" in refusal(written(content))


@pytest.mark.parametrize(
    "value",
    [
        {"dtype": "nn"},
        {"dtype": "load"},
        {"dtype": ["float32"]},
        {"device": "cuda:0"},
        {"device": "meta"},
        {"memory_format": "float32"},
        {"float": "1.5"},
        {"float": 1.5},
        {"float": "0x1.8p0"},
        {"ellipsis": False},
        {"slice": [0, 1]},
        {"code": "1"},
        {"node": 0, "tuple": []},
        {},
        1.5,
        2**64,
        "x" * 1000,
        [[[[[1]]]]],
        [1] * 100_000,
    ],
)
def test_a_value_that_no_program_writes_is_refused(value: Any) -> None:
    assert f"node {CAST} of the program" in refusal(with_argument(CAST, 1, value))


@pytest.mark.parametrize(
    "name",
    ["x", "param:", "file:/etc/passwd", "param:a\nb", "input:" + "x" * 1000, "kv:\u00e9", 1, None],
)
def test_a_binding_that_names_no_tensor_is_refused(name: Any) -> None:
    content = json.loads(sample().to_bytes())
    content["bindings"][0] = name
    assert "is not the name of a tensor" in refusal(written(content))


def test_the_order_of_nodes_is_held() -> None:
    content = json.loads(sample().to_bytes())
    nodes = content["nodes"]
    output = {"op": "output", "args": {"tuple": [[{"node": 0}]]}}
    for broken, reason in (
        ([*nodes[:3], nodes[0], *nodes[3:]], "a placeholder comes after another node"),
        ([*nodes, nodes[-1]], "the last node, and no other, is the output"),
        (nodes[:-1], "the last node, and no other, is the output"),
        ([], "the program has 0 nodes"),
        ([nodes[0], output], "1 placeholders have 2 names"),
    ):
        assert reason in refusal(written({**content, "nodes": broken}))


@pytest.mark.parametrize(
    "output", [[], {"node": CAST}, {"tuple": []}, {"tuple": [0]}, {"tuple": [None]}]
)
def test_an_output_that_is_not_a_sequence_of_results_is_refused(output: Any) -> None:
    assert "the output is not" in refusal(with_argument(8, 0, output))


def test_a_tensor_of_nothing_but_numbers_is_bounded() -> None:
    huge = {"tuple": [1 << 20, 1 << 20]}
    for name, arguments in (
        ("torch.empty", [huge]),
        ("torch.zeros", [1 << 20, 1 << 20]),
        ("torch.full", [huge, 0]),
        ("torch.arange", [0, 1 << 40]),
        ("torch.arange", [{"float": (1e300).hex()}]),
        ("method.new_zeros", [{"node": 0}, huge]),
    ):
        change = {"op": name, "args": {"tuple": arguments}}
        assert "elements; at most" in refusal(edited(VIEW, change))
    allowed = {"op": "torch.full", "args": {"tuple": [{"tuple": [3, 4]}, 1 << 40]}}
    Program.from_bytes(edited(VIEW, allowed))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1,2]",
        b"null",
        b"{" * 100_000,
        b'{"format":99,"bindings":[],"nodes":[]}',
        b'{"format":true,"bindings":[],"nodes":[]}',
        b'{"format":1,"bindings":{},"nodes":[]}',
        b'{"format":1,"bindings":[],"nodes":[null]}',
        b'{"format":1,"bindings":[],"nodes":[],"more":1}',
        b'{"format":1,"format":1,"bindings":[],"nodes":[]}',
        b'{"format":1,"bindings":[],"nodes":[{"op":"output","args":NaN}]}',
        b'{"format":1,"bindings":[],"nodes":[' + b"9" * 5000 + b"]}",
        sample().to_bytes() + b" ",
        sample().to_bytes().replace(b'"op":"method.view"', b'"op":"torch.load","op":"method.view"'),
        edited(VIEW, {"name": "x"}),
        edited(VIEW, {"kwargs": {}}),
        edited(VIEW, {"args": [{"node": 0}]}),
        edited(0, {"args": {"tuple": []}}),
    ],
)
def test_malformed_documents_are_corrupt_not_crashes(data: bytes) -> None:
    with pytest.raises(CorruptArtifactError):
        Program.from_bytes(data)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sample().to_bytes()
    monkeypatch.setattr(program, "MAX_NODES", 5)
    assert "9 nodes, must have 1 to 5" in refusal(data)
    monkeypatch.setattr(program, "MAX_BYTES", 100)
    assert f"a program of {len(data)} bytes; at most 100 are read" in refusal(data)


# ------------------------------------------------------------------------------------------ program
def program_sample() -> Program:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    hidden = graph.call_function(torch._C._nn.linear, (x, weight, None))
    halves = graph.call_method("split", (hidden, [2, 2]), {"dim": -1})
    first = graph.call_function(operator.getitem, (halves, 0))
    sliced = graph.call_function(operator.getitem, (first, (Ellipsis, slice(0, 1, None))))
    cast = graph.call_method("to", (sliced, torch.float64))
    scaled = graph.call_function(operator.mul, (cast, 0.1))
    graph.output((scaled, first))
    return Program(graph, ("input:x", "param:w"))


def run(program: Program, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = CallList(program.graph)(*args)
    return result


def test_round_trip_computes_the_same() -> None:
    program = program_sample()
    rebuilt = Program.from_bytes(program.to_bytes())
    assert program_sample().to_bytes() == program.to_bytes()
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    expected, actual = run(program, x, weight), run(rebuilt, x, weight)
    assert rebuilt.bindings == ("input:x", "param:w")
    assert actual[0].dtype == torch.float64
    for left, right in zip(expected, actual, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("target", [torch.load, torch.from_file, eval, print])
def test_an_operator_off_the_list_cannot_be_stored(target: Any) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"),)))
    with pytest.raises(CompileError, match="cannot be stored"):
        Program(graph, ("input:x",)).to_bytes()


def test_a_call_that_could_not_be_loaded_is_not_stored() -> None:
    """Else a start would store it, and every later one would take it for damaged."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.abs, (x,), {"out": x}),))
    with pytest.raises(CompileError, match=r"node 1 .*torch\.abs has no argument 'out'"):
        Program(graph, ("input:x",)).to_bytes()


# ---------------------------------------------------------------------------------------- operators
@pytest.mark.parametrize(
    "name", sorted(f"{kind}.{name}" for kind, names in NAMES.items() for name in names)
)
def test_every_name_is_torchs_and_is_stored_under_one_name(name: str) -> None:
    op, target = get_target(name)
    assert callable(getattr(Tensor, str(target)) if op == "call_method" else target)
    assert get_schema(name) is None
    stored = operator_name(op, target)
    assert stored is not None
    # Some functionals are the C++ function behind them.
    assert get_target(stored) == (op, target)


# ------------------------------------------------------------------------------------------- shapes
X, WEIGHT = torch.ones(3, 4), torch.ones(8, 4)


def shapes_program(*calls: tuple[Any, tuple[Any, ...]]) -> Program:
    """Calls one after the other over ``x`` and ``weight``; a number stands for an earlier value."""
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("weight")]
    for target, arguments in calls:
        given = tuple(values[x] if isinstance(x, int) else x for x in arguments)
        make = graph.call_method if isinstance(target, str) else graph.call_function
        values.append(make(target, given))
    graph.output((values[-1],))
    return Program(graph, ("input:x", "param:weight"))


def check(checked: Program) -> None:
    check_shapes(checked, [as_meta(X), as_meta(WEIGHT)])


def test_what_fits_passes_also_where_the_host_is_named() -> None:
    linear = torch.nn.functional.linear
    check(shapes_program((linear, (0, 1)), ("view", (2, (24,))), ("to", (3, torch.device("cpu")))))
    made = torch.full, ((3, 4), 1.0)
    check(shapes_program(made, (torch.add, (2, 0))))


@pytest.mark.parametrize(
    "calls",
    [
        [(torch.nn.functional.linear, (1, 0)), (torch.add, (2, 1))],
        [("view", (0, (5, 5)))],
        [(torch.cat, ((0, 1), "x"))],
        [(torch.gather, (0, 1, 1))],
    ],
)
def test_what_does_not_fit_is_named(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    with pytest.raises(CorruptArtifactError, match=r"\w+ does not fit its arguments: "):
        check(shapes_program(*calls))


def test_a_sequence_is_neither_repeated_nor_returned() -> None:
    """Python would make a tuple of 10 billion entries."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("weight")
    rows = graph.call_method("unbind", (x,))
    graph.output((graph.call_function(operator.mul, (rows, 10**10)),))
    with pytest.raises(CorruptArtifactError, match="mul calculates with what is no tensor"):
        check(Program(graph, ("input:x", "param:weight")))
    with pytest.raises(CorruptArtifactError, match="the output is not a sequence of tensors"):
        check(shapes_program(("unbind", (0,))))


def test_growth_is_bounded_and_takes_no_memory() -> None:
    """Forty doublings of 48 bytes would be 50 TB."""
    graph = fx.Graph()
    value, weight = graph.placeholder("x"), graph.placeholder("weight")
    for _ in range(40):
        value = graph.call_function(torch.cat, ([value, value],))
    graph.output((value, weight))
    with pytest.raises(CorruptArtifactError, match=r"cat_\d+ makes \d+ bytes; at most"):
        check(Program(graph, ("input:x", "param:weight")))


def test_a_program_that_reads_a_value_is_left_to_its_first_run() -> None:
    check(shapes_program(("item", (0,)), (torch.add, (0, 2))))


# ---------------------------------------------------------------------------------------- call list
def computation(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Calls of one to four arguments, keywords, sequences and slices that hold results."""
    rows = x.view(2, 6).split([2, 4], dim=-1)
    both = torch.cat([rows[1], rows[0], y], dim=1)
    position = both.argmax()
    picked = both[..., 0:2] + both[:, position % 2 :].sum()
    scaled = torch.add(picked, both[:, 2:4], alpha=0.5)
    last = torch.where(condition=scaled > 0, input=scaled, other=x.new_full((), -1.0))
    return torch.stack((last, scaled)).sum(), both.mul_(2), x.new_zeros(1, 2, 3)


def graph_of(function: Any = computation) -> fx.Graph:
    return fx.symbolic_trace(function).graph


def test_it_computes_what_generated_source_computes() -> None:
    graph = graph_of()
    generated, calls = fx.GraphModule({}, graph), CallList(graph)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(12), torch.randn(2, 3)
        expected, actual = generated(x.clone(), y.clone()), calls(x.clone(), y.clone())
        assert type(actual) is type(expected)
        for left, right in zip(expected, actual, strict=True):
            assert torch.equal(left, right)


def test_names_of_a_schema_are_passed_by_position() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    given = {"weight": weight, "input": x, "bias": None}
    graph.output((graph.call_function(torch.ops.aten.linear.default, (), given),))
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    assert torch.equal(CallList(graph)(x, weight)[0], torch.nn.functional.linear(x, weight))
    # An output may be an input.
    graph = fx.Graph()
    graph.output([value := graph.placeholder("x"), value])
    assert CallList(graph)(weight) == [weight, weight]


def test_a_value_is_freed_when_it_was_read_last() -> None:
    """As generated source does; else a step would hold every tensor that it made."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def make(x: Tensor) -> Tensor:
        nonlocal most
        made = x + 1
        alive.append(weakref.ref(made))
        most = max(most, sum(value() is not None for value in alive))
        return made

    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(20):
        value = graph.call_function(make, (value,))
        graph.call_function(make, (value,))
    graph.output((value,))
    calls = CallList(graph)
    (result,) = calls(torch.zeros(1))
    assert float(result) == 20.0
    assert most == 2, "what is read and what is made"
    del result
    gc.collect()
    assert [value for value in alive if value() is not None] == []


def test_a_run_that_fails_leaves_nothing_behind() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(operator.add, (x, 1))
    graph.output((graph.call_function(operator.truediv, (total, x)),))
    calls = CallList(graph)
    with pytest.raises(ZeroDivisionError):
        calls(0)
    assert calls(2) == (1.5,)


@pytest.mark.parametrize("op", ["get_attr", "call_module"])
def test_a_graph_that_embeds_something_is_refused(op: str) -> None:
    graph = fx.Graph()
    graph.output((graph.create_node(op, "weight"),))
    with pytest.raises(CompileError, match="embeds 'weight'"):
        CallList(graph)


def test_no_source_is_compiled_or_executed() -> None:
    graph = graph_of()
    seen: list[str] = []
    listening = True

    def hear(event: str, _: object) -> None:
        if listening and event in ("compile", "exec"):
            seen.append(event)

    sys.addaudithook(hear)
    CallList(graph)(torch.randn(12), torch.randn(2, 3))
    assert seen == []
    fx.GraphModule({}, graph)
    listening = False
    assert "exec" in seen, "the hook hears what it is there for"
