"""Attention over one compressed head: values, and bits that no batch, chunk or split changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts

OPS = torch.ops.rbln_emulator
# heads, compressed, rotated, block size, tokens
CASES = [(4, 48, 16, 16, 50), (16, 512, 64, 128, 140), (20, 32, 8, 32, 70), (1, 7, 2, 16, 33)]
Case = tuple[int, int, int, int, int]


class Request:
    """One request's tokens, and a cache with room for it."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        heads, self.latent, turned, block_size, self.length = case
        self.q = torch.randn(self.length, heads, self.latent + turned).to(dtype)
        self.kv = torch.randn(self.length, self.latent + turned + 3).to(dtype)
        self.parts = self.kv.split([self.latent, turned, 3], dim=1)
        self.scale = torch.tensor((self.latent + turned) ** -0.5)
        blocks = -(-self.length // block_size)
        shape = (blocks + 1, 1, 1, 1, block_size, self.latent + turned)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        self.table = (torch.randperm(blocks) + 1)[None]

    def run(self, begin: int, end: int) -> Tensor:
        """Tokens [begin, end): [end - begin, heads, compressed]."""
        kv_c, k_pe, _ = (part[begin:end] for part in self.parts)
        start = torch.tensor([[begin]], dtype=torch.int32)
        out: Tensor = OPS.latent_attention(
            self.q[begin:end], kv_c, k_pe, self.cache, self.scale, start, self.table, 1
        )
        return out

    def expected(self) -> Tensor:
        """In float64: keys are both parts of a token, values the first alone."""
        keys = torch.cat(self.parts[:2], dim=1).double()
        scores = torch.einsum("thd,sd->hts", self.q.double(), keys) * float(self.scale)
        unseen = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hts,sc->thc", weights, self.parts[0].double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_values_and_every_chunking(case: Case, dtype: torch.dtype) -> None:
    request = Request(case, dtype)
    one, whole = for_thread_counts(lambda: request.run(0, request.length))
    assert torch.equal(one, whole)
    assert_near(whole, request.expected())
    for chunk in (1, 7, 32):
        request.cache.fill_(float("nan"))
        begins = range(0, request.length, chunk)
        parts = [request.run(begin, min(begin + chunk, request.length)) for begin in begins]
        assert torch.equal(torch.cat(parts), whole), chunk


def test_rows_of_a_batch_are_their_own() -> None:
    requests = [Request((16, 512, 64, 16, 40), torch.bfloat16) for _ in range(3)]
    for request in requests:
        request.run(0, 39)
    alone = [request.run(39, 40) for request in requests]
    blocks = requests[0].cache.shape[0]
    tables = torch.cat([r.table + i * blocks for i, r in enumerate(requests)])
    last = [
        torch.cat([x[39:] for x in parts])
        for parts in zip(*((r.q, *r.parts[:2]) for r in requests), strict=True)
    ]
    caches = torch.cat([request.cache for request in requests])
    starts = torch.full((3, 1), 39)
    together = OPS.latent_attention(*last, caches, requests[0].scale, starts, tables, 3)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_has_a_weight_of_its_own(dtype: torch.dtype) -> None:
    x = torch.randn(37, 5, 90).to(dtype)[..., 10:74]
    weights = torch.randn(5, 33, 64).to(dtype)
    packed = torch.stack([OPS.pack_linear_weight(weight) for weight in weights])
    one, two = for_thread_counts(lambda: OPS.linear_heads(x, packed, 33))
    assert torch.equal(one, two)
    assert_near(one, torch.einsum("thk,hnk->thn", x.double(), weights.double()), scale=8)
    assert torch.equal(OPS.linear_heads(x[20:21], packed, 33), one[20:21])


def test_mistakes_are_named() -> None:
    request = Request((4, 48, 16, 16, 50), torch.float32)
    arguments = [request.q, *request.parts[:2], request.cache, request.scale]
    arguments += [torch.tensor([[0]]), request.table]
    for place, value, message in (
        (1, request.parts[0][:, 1:], "disagree for a batch of 1"),
        (2, request.parts[1].double(), "kv_c or k_pe has dtype Double"),
        (3, request.cache.expand(-1, 2, -1, -1, -1, -1), r"instead of \[N,1,1,1,S,C\+R\]"),
    ):
        wrong = [*arguments]
        wrong[place] = value
        with pytest.raises(RuntimeError, match=message):
            OPS.latent_attention(*wrong, 1)
    packed = OPS.pack_linear_weight(torch.randn(8, 9)).expand(4, -1, -1, -1).contiguous()
    with pytest.raises(RuntimeError, match="packed has shape"):
        OPS.linear_heads(request.q, packed, 8)
