"""Lowering of captured graphs for the emulated device, to calls of its kernels.

Between the two linears of an attention layer vLLM splits, normalises, rotates and views q, k and v,
and views the result back: twenty-odd calls, of which a small model's step mostly consists. They
become one call of ``self_attention``. Attention is the last that mixes tokens. Behind it a chunk
needs the last row of each prompt for its logits, and all rows only where hidden states are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from rbln_backend.collectives import collective_name
from rbln_backend.devices.emulated.ops import NAMESPACE
from rbln_backend.devices.emulated.packing import PACKABLE_DTYPES, can_pack
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import PACKED, PARAM


def example(node: object) -> Tensor | None:
    """Return the example tensor [...] of ``node``; None if it is no node or makes no tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def op_schema(node: object) -> torch.FunctionSchema | None:
    """Return the schema of the torch op that ``node`` calls, with or without its overload."""
    target = node.target if isinstance(node, fx.Node) else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def op_name(node: object) -> str:
    """Return ``namespace::name`` of the torch op that ``node`` calls, "" if it calls none."""
    schema = op_schema(node)
    return "" if schema is None else str(schema.name)


def get_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of a torch op by name, without those left to defaults."""
    schema = op_schema(node)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b, both [...], have equal shape, strides, offset and dtype."""
    if (a.shape, a.dtype, a.storage_offset()) != (b.shape, b.dtype, b.storage_offset()):
        return False
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size <= 1 or of_a == of_b for size, of_a, of_b in strides)


def add_method(graph: fx.Graph, name: str, source: fx.Node, *args: Argument) -> fx.Node:
    """Append ``source.name(*args)`` at the graph's insertion point, with its example."""
    node = graph.call_method(name, (source, *args))
    value = example(source)
    assert value is not None
    node.meta["example_value"] = getattr(value, name)(*args)
    return node


def is_method(node: object, *names: str) -> bool:
    """Return True if ``node`` calls one of these methods."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in names


def viewed(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it shows in another shape, each a view of the next; all have examples."""
    chain = [node]
    while is_method(chain[-1], "view", "reshape", "flatten", "unflatten"):
        source = chain[-1].args[0]
        if example(source) is None or not isinstance(source, fx.Node):
            break
        chain.append(source)
    return chain


def shape_arguments(sizes: Sequence[int]) -> tuple[tuple[int, ...]]:
    """The arguments of ``view`` and ``reshape`` that name every size."""
    return (tuple(int(size) for size in sizes),)


def elide_output_buffers(graph: fx.Graph) -> None:
    """``buffer = empty(s); buffer.view(t).copy_(x); ... buffer.view(u)`` becomes ``x.reshape(u)``.

    vLLM's attention layer hands the backend a fresh output buffer. A buffer that is filled by
    exactly one whole copy and only viewed otherwise is the copied value under another name.
    """
    for buffer in [node for node in graph.nodes if node.target is torch.empty]:
        # The buffer and every view of it or of its views, in the graph's order.
        names = [buffer]
        for name in names:
            names += [user for user in name.users if is_method(user, "view", "reshape")]
        writes = [user for name in names for user in name.users if is_method(user, "copy_")]
        if len(writes) == 1 and writes[0].args[0] in names:
            _replace_buffer(graph, names, writes[0])


def _replace_buffer(graph: fx.Graph, names: list[fx.Node], copy: fx.Node) -> None:
    source, target = copy.args[1], example(copy.args[0])
    value, order = example(source), {node: place for place, node in enumerate(graph.nodes)}
    readers = {user for name in names for user in name.users} - {copy} - set(names)
    if value is None or target is None or not isinstance(source, fx.Node) or copy.users:
        return
    if value.dtype != target.dtype or value.shape != target.shape:
        return
    if any(order[reader] < order[copy] or reader.op == "output" for reader in readers):
        return
    for name in names:
        read = [user for user in name.users if user in readers]
        shown = example(name)
        if not read or shown is None:
            continue
        with graph.inserting_before(copy):
            replacement = graph.call_method("reshape", (source, *shape_arguments(shown.shape)))
        replacement.meta["example_value"] = value.reshape(shown.shape)
        for user in read:
            user.replace_input_with(name, replacement)
    graph.erase_node(copy)
    for name in reversed(names):
        if not name.users:
            graph.erase_node(name)


def simplify_views(graph: fx.Graph) -> None:
    """Chains of views become one, and those that change nothing none."""
    for node in list(graph.nodes):
        shown = example(node)
        if shown is None:
            continue
        if is_method(node, "view", "reshape"):
            _shorten(node, shown)
        elif is_method(node, "permute"):
            if is_method(inner := node.args[0], "permute"):
                _drop_if_idle(node, inner.args[0], shown)
        elif node.target is operator.getitem:
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            if all(part is Ellipsis or isinstance(part, slice) for part in index):
                _drop_if_idle(node, node.args[0], shown)


def _shorten(node: fx.Node, shown: Tensor) -> None:
    """Rebase a view on its earliest equivalent source tensor."""
    for source in reversed(viewed(node)[1:]):
        value = example(source)
        assert value is not None
        if _drop_if_idle(node, source, shown):
            return
        try:
            direct = value.view(shown.shape)
        except (RuntimeError, ValueError):
            continue
        if same_layout(direct, shown):
            node.target = "view"
            node.args = (source, *shape_arguments(shown.shape))
            return


def _drop_if_idle(node: fx.Node, source: object, shown: Tensor) -> bool:
    """Replace ``node`` by ``source`` where both are the same view of the same memory."""
    value = example(source)
    if not isinstance(source, fx.Node) or value is None or not same_layout(value, shown):
        return False
    node.replace_all_uses_with(source)
    return True


# Every graph of an engine keeps results of its own: vectors are worth it, matrices are not.
_LIMIT_BYTES = 1 << 18


def fold_constants(program: Program, tensors: Sequence[Tensor]) -> tuple[fx.Graph, list[Tensor]]:
    """Return a copy of the graph and its inputs [...], with functions of small weights folded.

    Arithmetic over weights alone is done once, not at every step: each folded value becomes an
    input. ``tensors`` [...] are those of the program's bindings.
    """
    graph = program.copy_of_graph()
    placeholders = graph.find_nodes(op="placeholder")
    inputs = dict(zip(placeholders, tensors, strict=True))
    # Weights, and the values of calls over them and over one another.
    constants = {
        node: tensor
        for node, name, tensor in zip(placeholders, program.bindings, tensors, strict=True)
        if name.startswith(PARAM) and tensor.nbytes <= _LIMIT_BYTES
    }
    written, folded = _written(graph), []
    for node in graph.nodes:
        over = node.all_input_nodes
        if not over or not node.op.startswith("call") or not all(x in constants for x in over):
            continue
        if is_impure(node) or node in written:
            continue
        args = fx.node.map_arg(node.args, constants.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, constants.__getitem__)
        function = getattr(Tensor, node.target) if node.op == "call_method" else node.target
        with torch.no_grad():
            value = function(*args, **kwargs)
        if isinstance(value, Tensor):
            constants[node] = value
            folded.append(node)
    for node in folded:
        value = constants[node]
        if value.nbytes > _LIMIT_BYTES or all(user in constants for user in node.users):
            continue
        with graph.inserting_before(next(iter(graph.nodes))):
            constant = graph.placeholder(f"constant_{len(inputs)}")
        inputs[constant] = value
        node.replace_all_uses_with(constant)
    graph.eliminate_dead_code(is_impure_node=is_impure)
    for node in [node for node in inputs if not node.users]:
        graph.erase_node(node)
    return graph, [inputs[node] for node in graph.find_nodes(op="placeholder")]


def is_impure(node: fx.Node) -> bool:
    """Return True if ``node`` has side effects; fx treats what works in place as pure."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return node.target in (operator.setitem, *_IN_PLACE) or node.is_impure()


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Return the storages that are written in place, under any name."""
    names: set[fx.Node] = set()
    for node in graph.nodes:
        target = node.args[0] if is_impure(node) and node.args else None
        while isinstance(target, fx.Node):
            names.add(target)
            target = target.args[0] if target.args else None
    return names


# [B, L, H, G, D] in memory as the ops see it.
_TO_OP = (0, 2, 3, 1, 4)
_ATTENTION_OPTIONS = tuple(
    "sinks logits_soft_cap alibi_slopes k_scale v_scale attention_chunk attention_window".split()
)
_SPLITS: tuple[Callable[..., tuple[Tensor, ...]], ...] = (torch.split, torch.chunk)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads in rows [T, columns] of ``rows`` from ``column`` on, to be normalised by ``norm``."""

    rows: fx.Node
    column: int = 0
    norm: fx.Node | None = None
    eps: float = 0.0


def fuse_attention(graph: fx.Graph) -> None:
    """Replace the attention ops whose heads lie in rows of tokens; leave the others alone."""
    for node in list(graph.nodes):
        namespace, _, name = op_name(node).partition("::")
        if namespace == "rbln_emulated_ops" and "attention_naive" in name:
            _fuse(graph, node, get_arguments(node))


def _fuse(graph: fx.Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    q, k, v = (_token_rows(given[name]) for name in "qkv")
    value, values = example(given["q"]), example(given["v"])
    if q is None or k is None or v is None or value is None or values is None:
        return
    batch, kv_heads, group, length, head_size = value.shape
    if values.shape[-1] != head_size:
        return
    q, k, rotation = _unrotated(q, k, head_size)
    plain_q, plain_k = _before_norm(q, head_size), _before_norm(k, head_size)
    if plain_q is not None and plain_k is not None and plain_q.eps == plain_k.eps:
        q, k = plain_q, plain_k
    q, k, v = (_unsplit(x) for x in (q, k, v))
    is_window = "cache_seq_len" in given
    with graph.inserting_before(node):
        fused = graph.call_function(
            torch.ops.rbln_emulator.self_attention.default,
            (
                q.rows,
                q.column,
                k.rows,
                k.column,
                v.rows,
                v.column,
                q.norm,
                k.norm,
                q.eps,
                *rotation,
                given["kv_cache"],
                given["scale"],
                given["cache_seq_len" if is_window else "seq_idx"],
                given["cache_offset"] if is_window else None,
                given["block_tables"],
                *(given.get(name) for name in _ATTENTION_OPTIONS),
                group,
                batch,
                given.get("query_counts"),
            ),
        )
        width = kv_heads * group * head_size
        fused.meta["example_value"] = value.new_empty(batch * length, width)
        shape = shape_arguments((batch, length, kv_heads, group, head_size))
        seen = add_method(graph, "permute", add_method(graph, "view", fused, *shape), *_TO_OP)
    node.replace_all_uses_with(seen)
    graph.erase_node(node)


def _token_rows(heads: fx.Node) -> _Heads | None:
    """The [T, H * D] tensor that ``heads`` [B, H, G, L, D] shows, or None where there is none."""
    if not is_method(heads, "permute") or heads.args[1:] not in (_TO_OP, (_TO_OP,)):
        return None
    source = heads.args[0]
    return _rows_behind(source) if isinstance(source, fx.Node) else None


def _rows_behind(node: fx.Node) -> _Heads | None:
    for shown in viewed(node):
        value = example(shown)
        if value is not None and value.dim() == 2 and value.stride(1) == 1:
            return _Heads(shown)
    return None


def _unrotated(q: _Heads, k: _Heads, head_size: int) -> tuple[_Heads, _Heads, tuple[Any, ...]]:
    """Return both tensors before the rotary kernel, and its positions, its table and is_neox."""
    rotary = _get_part(q.rows, 0)
    if (
        rotary is not None
        and rotary is _get_part(k.rows, 1)
        and op_name(rotary) == "rbln_emulator::rotary_embedding"
        and rotary.args[4] == head_size
    ):
        positions, turned_q, turned_k, cache, _, is_neox = rotary.args
        before = [_rows_behind(x) for x in (turned_q, turned_k) if isinstance(x, fx.Node)]
        if len(before) == 2 and before[0] is not None and before[1] is not None:
            return before[0], before[1], (positions, cache, bool(is_neox))
    return q, k, (None, None, False)


def _get_part(node: fx.Node, index: int) -> fx.Node | None:
    """The node whose result's element ``index`` this is."""
    if node.target is operator.getitem and node.args[1] == index:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def _before_norm(heads: _Heads, head_size: int) -> _Heads | None:
    for norm in viewed(heads.rows):
        if op_name(norm) != "rbln_emulator::rms_norm":
            continue
        x, weight, eps = norm.args
        value = example(norm)
        if value is None or value.shape[-1] != head_size or not isinstance(x, fx.Node):
            return None
        rows = _rows_behind(x)
        return rows and replace(rows, norm=weight, eps=float(eps))  # type: ignore[arg-type]
    return None


def _unsplit(heads: _Heads) -> _Heads:
    """The rows that ``split`` or ``chunk`` cut ``heads`` from."""
    node, value = heads.rows, example(heads.rows)
    if node.target is not operator.getitem or value is None:
        return heads
    cut = node.args[0]
    if not is_method(cut, "split", "chunk") and getattr(cut, "target", None) not in _SPLITS:
        return heads
    assert isinstance(cut, fx.Node)
    whole = cut.args[0]
    rows = example(whole)
    if not isinstance(whole, fx.Node) or rows is None or rows.dim() != 2:
        return heads
    if rows.stride() != value.stride() and rows.shape[0] > 1:
        return heads
    column = int(value.storage_offset() - rows.storage_offset())
    return replace(heads, rows=whole, column=column)


_ROW_ARGUMENTS = {
    "linear": (0,),
    "quantized_linear": (0,),
    "rms_norm": (0,),
    "fused_add_rms_norm": (0, 1),
    "layer_norm": (0,),
    "activate": (0,),
    "moe_route": (0, 4),
    "moe": (0, 1, 2),
    "quantized_moe": (0, 1, 2),
}
"""Kernels that compute each row by itself: the places of their arguments with rows."""
_ELEMENTWISE = (operator.add, operator.mul, operator.sub, operator.truediv)
_IN_PLACE = (operator.iadd, operator.imul, operator.isub, operator.itruediv)
_RELU = (torch.relu, torch.nn.functional.relu)
_TENSOR_PARALLEL = "tp"
"""The group whose ranks have the same rows."""


def compute_last_rows_apart(graph: fx.Graph) -> None:
    """Gather rows of hidden states right behind the last attention, where the graph gathers any.

    The calls that compute all rows of them come last. A graph with a call behind its last attention
    that writes to a tensor of others is left as it is.
    """
    nodes = list(graph.nodes)
    output, results = nodes[-1], nodes[-1].args[0]
    if not isinstance(results, tuple) or len(results) < 2 or not isinstance(results[1], fx.Node):
        return
    # The call that gathers rows of the hidden states [L, H] that the graph returns.
    gathers = [user for user in results[1].users if is_method(user, "index_select")]
    attention = [number for number, node in enumerate(nodes) if "attention" in op_name(node)]
    if len(gathers) != 1 or gathers[0].args[1] != 0 or not attention:
        return
    gather, behind = gathers[0], nodes[attention[-1] + 1 : -1]
    if any(_is_seen(node, behind) for node in behind):
        return
    dim, rows = gather.args[1:]
    copies: dict[fx.Node, fx.Node] = {}

    def row_numbers(node: fx.Node) -> tuple[int, ...]:
        """As the function; none for a call that comes before the attention's end."""
        numbers = _row_arguments(node) if node in behind else ()
        if node.target is operator.getitem and numbers:
            # Of a tuple, which cannot be gathered.
            source = node.args[0]
            return numbers if isinstance(source, fx.Node) and row_numbers(source) else ()
        if node.target in _IN_PLACE and numbers:
            # What it writes to has to be new memory among the gathered rows, too.
            return numbers if _is_made(node.args[0]) and row_numbers(node.args[0]) else ()
        return numbers

    def gathered(node: Argument) -> fx.Node:
        """Return the gathered rows of what ``node`` computes, [L, ...] or a tuple of such."""
        assert isinstance(node, fx.Node)
        if node not in copies:
            if numbers := row_numbers(node):
                args = tuple(gathered(x) if n in numbers else x for n, x in enumerate(node.args))
                copies[node] = graph.create_node(node.op, node.target, args, dict(node.kwargs))
                if _adds_adapter(following := node.next):
                    written = (copies[node], gathered(following.args[1]), *following.args[2:])
                    graph.create_node(following.op, following.target, written)
            else:
                copies[node] = graph.call_method("index_select", (node, dim, rows))
        return copies[node]

    with graph.inserting_before(gather):
        gather.replace_all_uses_with(gathered(gather.args[0]))
    graph.erase_node(gather)
    # What nothing but hidden states needs moves to the end, in its order.
    needed = set[fx.Node]()
    waiting = [result for number, result in enumerate(results) if number != 1]
    while waiting:
        node = waiting.pop()
        if isinstance(node, fx.Node) and node not in needed:
            needed.add(node)
            waiting += [*node.all_input_nodes, *filter(_adds_adapter, (node.next,))]
    for node in behind:
        if node is not gather and node not in needed:
            output.prepend(node)


def _is_seen(node: fx.Node, behind: Sequence[fx.Node]) -> bool:
    """Return True if ``node`` writes to a tensor that other calls of ``behind`` may read."""
    if node.target in _IN_PLACE and isinstance(written := node.args[0], fx.Node):
        # What no kernel made and no row alone gave may be a view, such as [L, H, 2][..., 1].
        is_own = _is_made(written) or bool(_row_arguments(written))
        return not is_own or sum(user in behind for user in written.users) > 1
    schema = op_schema(node)
    is_mutable = is_impure(node) if schema is None else schema.is_mutable
    return is_mutable and not _adds_adapter(node)


def _adds_adapter(node: fx.Node) -> bool:
    """Return True if ``node`` adds a chunk's adapter to what the kernel before it made."""
    if op_name(node) != f"{NAMESPACE}::add_lora_" or node.args[0] is not node.prev:
        return False
    return _is_made(node.prev) and _is_one(node.args[2])


def _is_one(slots: object) -> bool:
    """Return True for a chunk's ``slots`` [1], which count for any number of rows."""
    value = example(slots)
    return value is not None and len(value) == 1


def _is_made(node: object) -> TypeGuard[fx.Node]:
    """Return True if a kernel of ours made the tensor, which then has memory of its own."""
    return op_name(node).startswith(f"{NAMESPACE}::")


def _row_arguments(node: fx.Node) -> tuple[int, ...]:
    """Return the numbers of the arguments with rows; none for a call that may mix rows."""
    if node.target is operator.getitem:
        # An index into a tensor, such as [1, L, H][0], takes rows away: another axis has them.
        results = op_schema(node.args[0])
        return (0,) if results is not None and len(results.returns) > 1 else ()
    if node.target in _ELEMENTWISE or node.target in _IN_PLACE:
        result = example(node)
        numbers: list[int] = []
        for number, argument in enumerate(node.args):
            if isinstance(argument, fx.Node):
                value = example(argument)
                if result is None or value is None:
                    return ()
                # Another shape is repeated over the rows.
                if value.dim() == result.dim() and len(value) == len(result):
                    numbers.append(number)
        return tuple(numbers)
    if node.target in _RELU:
        return () if node.kwargs.get("inplace") or len(node.args) > 1 else (0,)
    if collective_name(node.target) == "all_reduce":
        return (0,) if node.args[-1] == _TENSOR_PARALLEL else ()
    slots = get_arguments(node).get("slots")
    if node.kwargs or not (slots is None or _is_one(slots)):
        return ()
    namespace, _, name = op_name(node).partition("::")
    places = _ROW_ARGUMENTS.get(name, ()) if namespace == NAMESPACE else ()
    return tuple(n for n in places if n < len(node.args) and node.args[n] is not None)


_LINEAR_TARGETS = (torch._C._nn.linear, torch.nn.functional.linear)
_ACTIVATIONS = {
    torch._C._nn.gelu: "gelu",
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.silu: "silu",
    torch.nn.functional.softplus: "softplus",
    torch.sigmoid: "sigmoid",
    torch.nn.functional.sigmoid: "sigmoid",
    "sigmoid": "sigmoid",
}
_LAYER_NORM = ("weight", "bias", "eps")


def lower_graph(program: Program, *, pack_linear: bool) -> Program:
    """A new program over a copy of the graph; ``program`` is left as it was.

    ``pack_linear``: the native kernels are there, so linears read packed weights and whatever has
    a kernel calls it.
    """
    graph = program.copy_of_graph()
    bindings = dict(zip(graph.find_nodes(op="placeholder"), program.bindings, strict=True))
    elide_output_buffers(graph)
    if pack_linear:
        fuse_attention(graph)
        _pack_linears(graph, bindings)
        _call_kernels(graph)
    _elide_casts(graph)
    simplify_views(graph)
    graph.eliminate_dead_code(is_impure_node=is_impure)
    if pack_linear:
        compute_last_rows_apart(graph)
    for node in [node for node in bindings if not node.users]:
        graph.erase_node(node)
    graph.lint()
    return Program(graph, tuple(bindings[node] for node in graph.find_nodes(op="placeholder")))


def _pack_linears(graph: fx.Graph, bindings: dict[fx.Node, str]) -> None:
    packed_of: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.target in _LINEAR_TARGETS]:
        activation, weight, bias = (*node.args, node.kwargs.get("bias"))[:3]
        name, matrix = bindings.get(weight, ""), example(weight)
        if not name.startswith(PARAM) or matrix is None or not can_pack(matrix):
            continue
        packed_name = PACKED + name.removeprefix(PARAM)
        if packed_name not in packed_of:
            with graph.inserting_before(next(iter(graph.nodes))):
                packed_of[packed_name] = graph.placeholder(f"packed_{len(packed_of)}")
            bindings[packed_of[packed_name]] = packed_name
        with graph.inserting_before(node):
            kernel = graph.call_function(
                torch.ops.rbln_emulator.linear.default,
                (activation, packed_of[packed_name], bias, matrix.shape[0]),
            )
        kernel.meta = dict(node.meta)
        node.replace_all_uses_with(kernel)
        graph.erase_node(node)


def _call_kernels(graph: fx.Graph) -> None:
    """PyTorch's functions that have a kernel; see ``ops``."""
    ops = torch.ops.rbln_emulator
    for node in list(graph.nodes):
        value = example(node)
        if value is None or value.dtype not in PACKABLE_DTYPES:
            continue
        if (function := _activation(node)) is not None:
            node.op, node.target = "call_function", ops.activate.default
            node.args = (node.args[0], function, False)
        elif node.target is torch.nn.functional.layer_norm:
            x, shape = example(node.args[0]), _given(node, 1, "normalized_shape")
            weight, bias, eps = (_given(node, 2 + i, n) for i, n in enumerate(_LAYER_NORM))
            scales = [scale for scale in map(example, (weight, bias)) if scale is not None]
            # Over the last dimension, and all of one dtype.
            if x is None or len(shape) != 1 or any(scale.dtype != x.dtype for scale in scales):
                continue
            eps = 1e-5 if eps is None else eps
            node.target, node.args = ops.layer_norm.default, (node.args[0], weight, bias, eps)
        elif node.target is torch.nn.functional.embedding and _given(node, 3, "max_norm") is None:
            numbers, table = (_given(node, i, n) for i, n in enumerate(("input", "weight")))
            rows = example(numbers)
            if rows is None or rows.dtype != torch.int64 or not rows.is_contiguous():
                continue
            node.target, node.args = ops.take_rows.default, (table, numbers)
        else:
            continue
        node.kwargs = {}


def _activation(node: fx.Node) -> str | None:
    """The name of the kernel's function that computes what the node does, if there is one."""
    if node.op not in ("call_function", "call_method") or node.target not in _ACTIVATIONS:
        return None
    function, x = _ACTIVATIONS[node.target], example(node.args[0])
    if x is None or x.dtype not in PACKABLE_DTYPES or x.dim() == 0:
        return None
    if function == "gelu":
        return "gelu_tanh" if _given(node, 1, "approximate") == "tanh" else "gelu"
    # In place, or a softplus of another shape.
    is_plain = len(node.args) == 1 and not any(node.kwargs.values())
    return function if is_plain else None


def _given(node: fx.Node, place: int, name: str) -> Any:
    """An argument passed by place or by name, None where it is not passed."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _elide_casts(graph: fx.Graph) -> None:
    """Drop ``x.to(dtype)`` and its like where x already has the dtype."""
    for node in list(graph.nodes):
        if not is_method(node, "to", "float", "long", "contiguous"):
            continue
        before, after = (example(value) for value in (node.args[0], node))
        if before is None or after is None or before.dtype != after.dtype:
            continue
        if before.stride() == after.stride() and before.device == after.device:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
