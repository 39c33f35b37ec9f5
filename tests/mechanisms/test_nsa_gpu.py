"""Native Sparse Attention on a GPU: its parts and the layer against float64, and against fla-core's kernels.

fla-core wants 16 query heads for each key/value head, and averages its compressed blocks, which have the size of the
selected ones and do not overlap: with blocks averaged alike, everything can be compared but the MLP.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.block_sparse import GivenBlocks
from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kernels.common.geometry import first_blocks, query_blocks
from moba_train.attention.layout import Layout, packed_layout
from moba_train.mechanisms.nsa import selection
from moba_train.mechanisms.nsa import selection_kernel as kernel
from moba_train.mechanisms.nsa.compressed import CompressedAttention, CompressedBlocks
from moba_train.mechanisms.nsa.selection import BlockChoice
from tests.attention.helpers import make_qkv, triple
from tests.attention.kind_checks import MODEL, make_layer, results

pytestmark = pytest.mark.gpu

LENGTHS = [1024, 1536]
"""Whole blocks of 64 tokens: fla-core counts incomplete ones as compressed blocks that nobody sees."""


def assert_near(got: Tensor, want: Tensor, limit: float = 0.01) -> None:
    """The norm of the difference is a small part of the norm."""
    assert (got.double() - want.double()).norm() <= limit * want.double().norm()


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(out.numel(), device=out.device).view_as(out).cos().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def compressed(
    attention: CompressedAttention, q: Tensor, k: Tensor, v: Tensor, layout: Layout
) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv] and lse."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = LOCAL_ENGINE.shard(layout).attend(*triple(leaves), attention)
    return gradients(out, leaves), lse


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [[1300, 0, 1, 31, 699], [20_000]], ids=["packed", "long"])
def test_compressed_attention_equals_float64(lengths: list[int], head_dim: int) -> None:
    blocks, layout = CompressedBlocks(32, 16), packed_layout(lengths, "cuda")
    q = make_qkv(layout.total, 8, 2, head_dim, "cuda", torch.bfloat16)[0]
    _, k, v = make_qkv(blocks.bound(layout), 8, 2, head_dim, "cuda", torch.bfloat16, seed=1)
    got, lse = compressed(CompressedAttention(blocks, head_dim), q, k, v, layout)
    plain = CompressedAttention(blocks, head_dim, "reference")
    want, exact_lse = compressed(plain, q.double(), k.double(), v.double(), layout)
    for a, b in zip(got, want, strict=True):
        assert_near(a, b)
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (3, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_probabilities_in_plain_pytorch_equal_float64(head_dim: int, heads: int, kv_heads: int) -> None:
    """On a GPU their products are of 16-bit inputs."""
    blocks, layout = CompressedBlocks(32, 16), packed_layout([3000, 0, 1, 999], "cuda")
    q, k, lse = queries_and_keys(blocks, layout, heads, kv_heads, head_dim)
    seen = blocks.seen(layout)
    got = selection.group_probabilities(q, k, lse, *seen, head_dim**-0.5)
    want = selection.group_probabilities(q.double(), k.double(), lse.double(), *seen, head_dim**-0.5)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


def queries_and_keys(
    blocks: CompressedBlocks, layout: Layout, heads: int, kv_heads: int, head_dim: int
) -> list[Tensor]:
    """Random queries, compressed keys, and the queries' log-sum-exp over those they see."""
    q = make_qkv(layout.total, heads, kv_heads, head_dim, "cuda", torch.bfloat16)[0].detach()
    _, k, v = make_qkv(blocks.bound(layout), heads, kv_heads, head_dim, "cuda", torch.bfloat16, seed=1)
    _, lse = LOCAL_ENGINE.shard(layout).attend(q, k.detach(), v.detach(), CompressedAttention(blocks, head_dim))
    return [q, k.detach(), lse]


@pytest.mark.parametrize(
    ("lengths", "head_dim", "group", "topk"),
    [([3000, 0, 1, 999], 64, 4, 16), ([2500, 1500], 128, 3, 40), ([16_384], 64, 4, 16), ([9000], 128, 1, 100)],
)
def test_the_kernel_chooses_the_blocks_with_the_highest_scores(
    lengths: list[int], head_dim: int, group: int, topk: int
) -> None:
    """By scores in float64: each query's blocks are the forced ones and others whose scores no other block exceeds by
    more than their rounding; ascending, -1 behind, and equal again."""
    blocks, layout = CompressedBlocks(32, 16), packed_layout(lengths, "cuda")
    q, k, lse = queries_and_keys(blocks, layout, 2 * group, 2, head_dim)
    choice = BlockChoice(blocks, 64, topk=topk, first=1, local=2)
    assert kernel.able(q, topk - 1)
    found_HnC = choice.choose(q, k, lse, layout, head_dim**-0.5)
    assert torch.equal(found_HnC, choice.choose(q, k, lse, layout, head_dim**-0.5))
    found = found_HnC[::group].long()
    exact = selection.group_probabilities(q.double(), k.double(), lse.double(), *blocks.seen(layout), head_dim**-0.5)
    scores_KnM = choice.block_scores(exact, layout)
    own_n, first_n = query_blocks(layout, 64)
    ids_M = torch.arange(scores_KnM.shape[2], device="cuda")
    history_nM = (first_n[:, None] <= ids_M) & (ids_M < own_n[:, None])
    forced_nM = history_nM & ((ids_M == first_n[:, None]) | (ids_M == own_n[:, None] - 1))
    taken_KnM = torch.zeros(*scores_KnM.shape[:2], len(ids_M) + 1, dtype=torch.bool, device="cuda")
    taken_KnM.scatter_(2, torch.where(found < 0, len(ids_M), found), True)
    taken_KnM = taken_KnM[..., :-1]
    assert torch.equal(taken_KnM.sum(2), history_nM.sum(1).clamp(max=topk - 1).expand(2, -1))
    assert torch.equal(taken_KnM & forced_nM, forced_nM.expand_as(taken_KnM))
    assert not (taken_KnM & ~history_nM).any()
    listed = torch.where(found < 0, len(ids_M), found)
    assert torch.equal(listed, listed.sort(-1).values)
    others_KnM = history_nM & ~forced_nM
    worst = scores_KnM.masked_fill(~(taken_KnM & others_KnM), torch.inf).amin(2)
    missed = scores_KnM.masked_fill(taken_KnM | ~others_KnM, -torch.inf).amax(2)
    assert (missed <= worst * 1.002 + 1e-5).all()


def test_the_layer_equals_float64_with_the_same_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on the GPU, then float64 on the CPU, which is given the blocks that the first selected."""
    model = MODEL.model_copy(update={"hidden_size": 128, "heads": 8, "kv_heads": 2, "head_dim": 64, "init_std": 0.05})
    exact = make_layer("nsa", {"topk": 6}, [1500, 0, 1, 547], model=model)
    with torch.no_grad():  # as large as trained weights make them
        for name, parameter in exact.parameters.named_parameters():
            if parameter.dim() == 2 and name.endswith("weight"):
                parameter.mul_(2 * parameter.shape[1] ** -0.5)
    inputs = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in exact.inputs()]
    module = type(exact.kind).parameters(exact.kind.options, model, 0).to("cuda", torch.bfloat16)
    module.load_state_dict(exact.parameters.state_dict())
    ours = exact.with_inputs(inputs, parameters=module, layout=packed_layout([1500, 0, 1, 547], "cuda"))

    chosen = []
    choose = BlockChoice.choose

    def record(*arguments: Any) -> Any:
        chosen.append(choose(*arguments))
        return chosen[-1]

    monkeypatch.setattr(BlockChoice, "choose", record)
    out, grads, parameters = results(ours)
    monkeypatch.setattr(BlockChoice, "choose", lambda *_: chosen[0].cpu())
    exact_out, exact_grads, exact_parameters = results(exact)
    assert_near(out[0].cpu(), exact_out[0], 0.02)
    for got, want in zip(grads, exact_grads, strict=True):
        assert_near(got.cpu(), want, 0.04)
    for name, want in exact_parameters.items():
        assert_near(parameters[name].cpu(), want, 0.06)


def fla_inputs(head_dim: int = 64) -> list[Tensor]:
    """q, k, v of 16 query heads for each of two key/value heads."""
    return list(make_qkv(sum(LENGTHS), 32, 2, head_dim, "cuda", torch.bfloat16))


def averaged(x_TKD: Tensor) -> Tensor:
    return x_TKD.detach().unflatten(0, (-1, 64)).float().mean(1).to(x_TKD.dtype)


def test_selected_blocks_equal_those_of_fla() -> None:
    """Equal block ids in, equal outputs and gradients out."""
    parallel_nsa = pytest.importorskip("fla.ops.nsa").parallel_nsa
    q, k, v = fla_inputs()
    layout = packed_layout(LENGTHS, "cuda")
    generator = torch.Generator().manual_seed(0)
    own_T = layout.positions(layout.q_tokens, layout.q_documents).cpu() // 64
    luck_KTN = torch.rand(2, layout.total, 24, generator=generator).masked_fill(torch.arange(24) >= own_T[:, None], 2.0)
    values_KTC, ids_KTC = luck_KTN.topk(15, largest=False)
    history_KTC = torch.where(values_KTC > 1, 99, ids_KTC).sort(-1).values
    history_KTC = torch.where(history_KTC == 99, -1, history_KTC)

    first_T = first_blocks(layout.cu_seqlens, 64)[layout.q_documents].cpu()
    selected_KTC = torch.where(history_KTC < 0, -1, history_KTC + first_T[:, None]).int().cuda()
    attention = GivenBlocks(64, 15, 64, "auto", "attention.nsa.backend")
    ours, _ = LOCAL_ENGINE.shard(layout).attend(q, k, v, attention, selected_KTC.repeat_interleave(16, 0))
    indices = torch.cat([own_T.expand(2, -1).unsqueeze(-1), history_KTC], -1).transpose(0, 1).cuda()
    theirs = parallel_nsa(
        *(x.unsqueeze(0) for x in (q, k, v)),
        block_indices=indices.unsqueeze(0).contiguous(),
        block_counts=16,
        block_size=64,
        cu_seqlens=layout.cu_seqlens.long(),
    )
    for got, want in zip(gradients(ours, [q, k, v]), gradients(theirs[0], [q, k, v]), strict=True):
        assert_near(got, want)


def test_compressed_branch_equals_that_of_fla() -> None:
    pytest.importorskip("fla.ops.nsa")
    from fla.ops.nsa.compression import parallel_nsa_compression

    q, k, v = fla_inputs()
    layout = packed_layout(LENGTHS, "cuda")
    many_k, many_v = averaged(k), averaged(v)
    got, lse = compressed(CompressedAttention(CompressedBlocks(64, 64), 64), q, many_k, many_v, layout)
    leaves = [x.detach().unsqueeze(0).requires_grad_() for x in (q, many_k, many_v)]
    theirs, their_lse = parallel_nsa_compression(
        *leaves, layout.total, block_size=64, scale=64**-0.5, cu_seqlens=layout.cu_seqlens.long()
    )
    for a, b in zip(got, [x[0] for x in gradients(theirs, leaves)], strict=True):
        assert_near(a, b, 0.02)  # sums over thousands of queries, of products rounded to bf16
    sees = lse > -torch.inf
    torch.testing.assert_close(lse[sees], their_lse[0].T[sees].float(), rtol=0, atol=5e-3)


def test_selection_equals_that_of_fla() -> None:
    """Nearly all queries get equal blocks: the two round probabilities that are nearly equal in other ways."""
    pytest.importorskip("fla.ops.nsa")
    from fla.ops.nsa.parallel import parallel_nsa_topk

    q, k, _ = (x.detach() for x in fla_inputs())
    layout = packed_layout(LENGTHS, "cuda")
    blocks, many_k = CompressedBlocks(64, 64), averaged(k)
    _, lse = compressed(CompressedAttention(blocks, 64), q, many_k, many_k, layout)
    chosen = BlockChoice(blocks, 64, topk=8, first=1, local=2).choose(q, many_k, lse, layout, 64**-0.5)[::16]
    theirs = parallel_nsa_topk(
        q.unsqueeze(0),
        many_k.unsqueeze(0),
        TK=layout.total,
        lse=lse.T.unsqueeze(0).masked_fill(lse.T.unsqueeze(0) == -torch.inf, 0).contiguous(),
        block_counts=8,
        block_size=64,
        scale=64**-0.5,
        cu_seqlens=layout.cu_seqlens.long(),
    )
    first_T = first_blocks(layout.cu_seqlens, 64)[layout.q_documents].cpu().tolist()
    own_T = (layout.positions(layout.q_tokens, layout.q_documents) // 64).cpu().tolist()
    ours, theirs = chosen.cpu().tolist(), theirs[0].transpose(0, 1).cpu().tolist()
    same = 0
    for kv in range(2):
        for token, (first, own) in enumerate(zip(first_T, own_T, strict=True)):
            mine = {block - first for block in ours[kv][token] if block >= 0} | {own}
            same += mine == {block for block in theirs[kv][token] if block >= 0}
    assert same > 0.98 * 2 * layout.total
