"""The signatures of the Python callables that a stored program may name.

Torch's own are overloaded in its argument parser and have no schema that Python can read. A line
is one way to call a function; several lines of one name are alternatives. Arguments that would
write elsewhere (``out``), draw random numbers or track gradients are left out. The text's form is
that of ``signatures.parse``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rbln_backend.compiler.programs.signatures import Signature, parse

_MADE = "*, dtype: dtype|none =, device: device|none =, pin_memory: bool ="
_LIKE = f"{_MADE}, memory_format: memory_format ="

# Functions of torch and methods of tensors with the same arguments. A method's first is the tensor
# and has no name.
_BOTH = """
abs(input)
add(input, other: tensor|number, *, alpha: number =)
addmm(input, mat1, mat2, *, beta: number =, alpha: number =)
all(input, dim: int|ints|none =, keepdim: bool =)
any(input, dim: int|ints|none =, keepdim: bool =)
argmax(input, dim: int|none =, keepdim: bool =)
bmm(input, mat2)
chunk(input, chunks: int, dim: int =) -> tensors
clamp(input, min: tensor|number|none =, max: tensor|number|none =)
cos(input)
cumsum(input, dim: int, *, dtype: dtype|none =)
div(input, other: tensor|number, *, rounding_mode: str|none =)
eq(input, other: tensor|number)
exp(input)
expm1(input)
flatten(input, start_dim: int =, end_dim: int =)
floor(input)
gather(input, dim: int, index)
ge(input, other: tensor|number)
gt(input, other: tensor|number)
index_select(input, dim: int, index)
le(input, other: tensor|number)
log(input)
logical_and(input, other)
logical_not(input)
logical_or(input, other)
lt(input, other: tensor|number)
masked_fill(input, mask, value: tensor|number)
matmul(input, other)
max(input)
max(input, other)
max(input, dim: int, keepdim: bool =) -> 2
maximum(input, other)
mean(input, *, dtype: dtype|none =)
mean(input, dim: int|ints|none, keepdim: bool =, *, dtype: dtype|none =)
min(input)
min(input, other)
min(input, dim: int, keepdim: bool =) -> 2
minimum(input, other)
mm(input, mat2)
movedim(input, source: int, destination: int)
movedim(input, source: ints, destination: ints)
mul(input, other: tensor|number)
narrow(input, dim: int, start: int, length: int)
ne(input, other: tensor|number)
neg(input)
outer(input, vec2)
pow(input, exponent: tensor|number)
reciprocal(input)
relu(input)
repeat_interleave(input, repeats: tensor|int, dim: int|none =, *, output_size: int|none =)
rsqrt(input)
scatter(input, dim: int, index, src)
scatter(input, dim: int, index, value: number)
select(input, dim: int, index: int)
sigmoid(input)
sin(input)
softmax(input, dim: int, dtype: dtype|none =)
sqrt(input)
square(input)
squeeze(input, dim: int|ints =)
std(input, dim: int|ints|none =, unbiased: bool =, keepdim: bool =)
std(input, dim: int|ints|none =, *, correction: number|none =, keepdim: bool =)
sub(input, other: tensor|number, *, alpha: number =)
sum(input, *, dtype: dtype|none =)
sum(input, dim: int|ints|none, keepdim: bool =, *, dtype: dtype|none =)
tanh(input)
tensor_split(input, sections: int, dim: int =) -> tensors
tensor_split(input, indices: ints, dim: int =) -> tensors
tensor_split(input, indices_or_sections: int|ints, dim: int =) -> tensors
topk(input, k: int, dim: int =, largest: bool =, sorted: bool =) -> 2
transpose(input, dim0: int, dim1: int)
tril(input, diagonal: int =)
triu(input, diagonal: int =)
unbind(input, dim: int =) -> tensors
unsqueeze(input, dim: int)
var(input, dim: int|ints|none =, unbiased: bool =, keepdim: bool =)
var(input, dim: int|ints|none =, *, correction: number|none =, keepdim: bool =)
"""

_FUNCTIONS = f"""
add(input: number, other, *, alpha: number =)
arange(end: number, {_MADE})
arange(start: number, end: number, {_MADE})
arange(start: number, end: number, step: number, {_MADE})
cat(tensors: tensors, dim: int =)
div(input: number, other, *, rounding_mode: str|none =)
concat(tensors: tensors, dim: int =)
einsum(equation: str, *operands: tensors)
empty(*size: ints, {_LIKE})
empty_like(input, {_LIKE})
full(size: ints, fill_value: number, {_MADE})
full_like(input, fill_value: number, {_LIKE})
mul(input: number, other)
ones(*size: ints, {_MADE})
ones_like(input, {_LIKE})
permute(input, dims: ints)
pow(input: number, exponent)
reshape(input, shape: ints)
split(tensor, split_size_or_sections: int|ints, dim: int =) -> tensors
stack(tensors: tensors, dim: int =)
sub(input: number, other, *, alpha: number =)
tile(input, dims: ints)
where(condition, input: tensor|number, other: tensor|number)
zeros(*size: ints, {_MADE})
zeros_like(input, {_LIKE})
"""

_METHODS = f"""
add_(input, other: tensor|number, *, alpha: number =)
bfloat16(input, memory_format: memory_format =)
bitwise_and_(input, other: tensor|number)
bool(input, memory_format: memory_format =)
clamp_(input, min: tensor|number|none =, max: tensor|number|none =)
clone(input, *, memory_format: memory_format|none =)
contiguous(input, memory_format: memory_format =)
copy_(input, src, non_blocking: bool =)
detach(input)
div_(input, other: tensor|number, *, rounding_mode: str|none =)
expand(input, *size: ints)
expand_as(input, other)
fill_(input, value: tensor|number)
float(input, memory_format: memory_format =)
half(input, memory_format: memory_format =)
index_copy_(input, dim: int, index, source)
int(input, memory_format: memory_format =)
item(input) -> number
long(input, memory_format: memory_format =)
masked_fill_(input, mask, value: tensor|number)
mul_(input, other: tensor|number)
new_empty(input, *size: ints, {_MADE})
new_full(input, size: ints, fill_value: number, {_MADE})
new_ones(input, *size: ints, {_MADE})
new_zeros(input, *size: ints, {_MADE})
permute(input, *dims: ints)
repeat(input, *repeats: ints)
reshape(input, *shape: ints)
split(input, split_size: int|ints, dim: int =) -> tensors
tile(input, *dims: ints)
sub_(input, other: tensor|number, *, alpha: number =)
t(input)
to(input, dtype: dtype, non_blocking: bool =, copy: bool =, *, memory_format: memory_format|none =)
to(input, device: device|none =, dtype: dtype|none =, non_blocking: bool =, copy: bool =)
to(input, other, non_blocking: bool =, copy: bool =)
type_as(input, other)
unflatten(input, dim: int, sizes: ints)
view(input, *size: ints)
view(input, dtype: dtype)
view_as(input, other)
zero_(input)
"""

# Those of torch.nn.functional; Dynamo records some by the C++ function behind them.
_FUNCTIONAL = """
embedding(input, weight, padding_idx: int|none =, max_norm: none =, norm_type: float =, \
scale_grad_by_freq: bool =, sparse: bool =)
group_norm(input, num_groups: int, weight: tensor|none =, bias: tensor|none =, eps: float =)
layer_norm(input, normalized_shape: ints, weight: tensor|none =, bias: tensor|none =, eps: float =)
normalize(input, p: float =, dim: int|ints =, eps: float =)
relu(input, inplace: bool =)
rms_norm(input, normalized_shape: ints, weight: tensor|none =, eps: float|none =)
sigmoid(input)
silu(input, inplace: bool =)
softmax(input, dim: int, _stacklevel: int =, dtype: dtype|none =)
tanh(input)
"""

_C_FUNCTIONS = """
gelu(input, *, approximate: str =)
linear(input, weight, bias: tensor|none =)
one_hot(tensor, num_classes: int =)
pad(input, pad: ints, mode: str =, value: number|none =)
scaled_dot_product_attention(query, key, value, attn_mask: tensor|none =, dropout_p: float =, \
is_causal: bool =, *, scale: float|none =, enable_gqa: bool =)
silu(input)
softplus(input, beta: number =, threshold: number =)
"""

_BINARY = (
    "add sub mul truediv floordiv mod pow iadd isub imul itruediv eq ne lt le gt ge and_ or_ rshift"
).split()
_OPERATOR = "\n".join(
    [
        *(f"{name}(a, b: tensor|number)" for name in _BINARY),
        *(f"{name}(a: number, b)" for name in _BINARY),
        *(f"{name}(a: number, b: number) -> number" for name in _BINARY),
        "matmul(a, b)",
        "neg(a)",
        "neg(a: number) -> number",
        "invert(a)",
        "getitem(a, b: index)",
        "getitem(a: tensors, b: int)",
        "getitem(a: tensors, b: slice) -> tensors",
        "setitem(a, b: index, c: tensor|number) -> nothing",
    ]
)


def _table(*texts: str) -> Mapping[str, Sequence[Signature]]:
    found: dict[str, list[Signature]] = defaultdict(list)
    for line in "\n".join(texts).split("\n"):
        if line:
            name, signature = parse(line)
            found[name].append(signature)
    return dict(found)


BY_KIND: Mapping[str, Mapping[str, Sequence[Signature]]] = {
    "torch": _table(_BOTH, _FUNCTIONS),
    "method": _table(_BOTH, _METHODS),
    "functional": _table(_C_FUNCTIONS, _FUNCTIONAL),
    "nn": _table(_C_FUNCTIONS),
    "operator": _table(_OPERATOR),
}
"""By what stands before the dot of a stored name, then by what stands after it."""
