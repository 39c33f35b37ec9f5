"""How `nsa`, `infllm_v2`, `msa` and `seer` score and choose blocks, in Triton's interpreter."""

import pytest
import torch

from moba_train.attention.kernels.common import selection
from moba_train.attention.kernels.triton import highest_scores
from moba_train.attention.layout import TokenRange, layout_arguments
from moba_train.mechanisms.gates import grid, index_operators, seer_operators
from moba_train.mechanisms.infllm_v2.infllm_v2_kind import InfLLMV2Attention
from moba_train.mechanisms.infllm_v2.scores import window_means
from moba_train.mechanisms.nsa import selection as nsa_selection
from moba_train.mechanisms.nsa import selection_kernel as nsa_kernel
from moba_train.mechanisms.nsa.compressed import CompressedAttention, CompressedBlocks
from tests.attention.kernel_checks import error, inputs, layout_of
from tests.attention.quick_interpreter import quicken

quicken()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "blocks", "choice"),
    [
        pytest.param(4, 2, 64, CompressedBlocks(4, 2), (8, 5, 1, 2), id="overlaps"),
        pytest.param(3, 1, 128, CompressedBlocks(4, 4), (4, 19, 0, 1), id="no-overlap"),
    ],
)
def test_blocks_chosen_by_compressed_ones_equal_those_of_plain_pytorch(
    heads: int, kv_heads: int, head_dim: int, blocks: CompressedBlocks, choice: tuple[int, int, int, int]
) -> None:
    """Packed documents and parts of their queries; of equal scores, such as 0 where nothing is seen, the lower id."""
    block_size, topk, first, local = choice
    layout = layout_of([180, 0, 1, 3, 40], "cpu")
    q = inputs([224], heads, kv_heads, head_dim, torch.float32, "cpu")[0]
    k, v = (x.detach() for x in inputs([blocks.bound(layout)], heads, kv_heads, head_dim, torch.float32, "cpu")[1:3])
    _, lse = CompressedAttention(blocks, head_dim, "reference").attend(q, k, v, layout, ())
    ours, plain = (
        nsa_selection.BlockChoice(blocks, block_size, topk, first, local, backend) for backend in ("auto", "reference")
    )
    assert nsa_kernel.able(q, topk - 1)
    whole = plain.choose(q, k, lse, layout, head_dim**-0.5)
    assert (whole >= 0).sum() > 0.5 * whole.numel()
    assert torch.equal(ours.choose(q, k, lse, layout, head_dim**-0.5), whole)
    part = layout.part((TokenRange(100, 120), TokenRange(170, 200)), None)
    rows = part.q_tokens
    assert torch.equal(ours.choose(q[rows], k, lse[:, rows], part, head_dim**-0.5), whole[:, rows])


@pytest.mark.parametrize(("first", "local", "count"), [(1, 3, 7), (0, 1, 3), (2, 2, 40)])
def test_the_highest_scores_are_chosen_as_in_plain_pytorch(first: int, local: int, count: int) -> None:
    """Random scores, equal ones, none at all; rows with fewer blocks than are wanted."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 50, 37, generator=generator)
    scores[0, :25] = (scores[0, :25] * 2).round()
    scores[1, ::7, ::3] = -torch.inf
    scores[1, 3] = 0.0
    scores[1, 3, ::2] = -0.0
    first_t = torch.tensor([0] * 20 + [4] * 30)
    queries = selection.QueryBlocks(torch.minimum(first_t + torch.arange(50), torch.tensor(36)), first_t)
    assert highest_scores.able(scores)
    got = selection.choose_blocks(scores, queries, count, first=first, local=local)
    assert torch.equal(got, selection.choose_blocks(scores.double(), queries, count, first=first, local=local))


@pytest.mark.parametrize(("window", "block_size", "together"), [(32, 64, 2), (48, 96, 1)])
def test_scores_of_blocks_equal_plain_pytorch(
    window: int, block_size: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of queries, over documents, for the queries of a shard; heads of a group at once, or one by one."""
    monkeypatch.setattr("moba_train.mechanisms.infllm_v2.score_kernels.together", lambda group: together)
    sizes = {"block_size": block_size, "topk": 5, "local_blocks": 2, "window": window, "stride": 16}
    options = InfLLMV2Attention.Options(**sizes, dense_len=1)
    whole = layout_of([190, 0, 1, 20, 90], "cpu")
    layout = whole.part((TokenRange(30, 180), TokenRange(230, 301)), None)
    (q, k, *_), attention = inputs([301], 2, 1, 64, torch.float32, "cpu"), InfLLMV2Attention(options, 64)
    windows = window_means(attention.summarize(k, whole), options.window // options.stride)
    monkeypatch.setattr("moba_train.attention.kernels.common.reference._SCORES_PER_CHUNK", {"cpu": 6000})
    scores = torch.full((2, len(layout.q_tokens), 8), torch.nan)
    for which, kernels in enumerate((True, False)):
        for rows, blocks, found in attention.scores.chunks(q[layout.q_tokens], windows, layout, kernels=kernels):
            scores[which, rows, blocks] = found[0]
    sees = layout.positions(layout.q_tokens, layout.q_documents) + 1 >= options.window
    kernel, plain = (x[sees & ~scores.isnan().any(0).all(-1)] for x in scores)
    compared = ~(kernel.isnan() | plain.isnan())
    assert (kernel[compared] > 0).float().mean() > 0.3
    torch.testing.assert_close(kernel[compared], plain[compared], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "keys", "widths", "block_size", "count", "dtype", "ranges", "every"),
    [
        ([130, 0, 1, 70], 4, 2, 1, (64, 64), 64, 1, torch.float32, None, 1),
        ([130, 1, 70], 4, 2, 2, (64, 64), 64, 1, torch.float16, None, 1),
        ([150, 40], 3, 1, 1, (64, 32), 80, 9, torch.float16, None, 3),
        ([210], 2, 1, 1, (128, 64), 200, 1, torch.float32, None, 1),
        ([200, 20], 4, 2, 2, (64, 16), 40, 2, torch.float32, ((40, 70), (150, 201)), 4),
        ([90], 9, 9, 1, (64, 16), 64, 1, torch.float32, None, 1),
    ],
)
def test_index_branches_select_and_learn_as_in_plain_pytorch(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    keys: int,
    widths: tuple[int, int],
    block_size: int,
    count: int,
    dtype: torch.dtype,
    ranges: tuple[tuple[int, int], ...] | None,
    every: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Selected blocks, the divergence and its gradients: over the selected blocks, and over all of them."""
    monkeypatch.setitem(grid._SCORES_PER_CHUNK, "cpu", 3000 * kv_heads)  # several chunks
    kept = 2**27 if every == 1 else 0  # lists of pairs are those of the forward pass, or made again
    monkeypatch.setattr("moba_train.mechanisms.gates.msa_kernels._KEPT_PAIRS", kept)
    layout = layout_of(lengths, "cpu")
    if ranges:
        layout = layout.part(tuple(TokenRange(*given) for given in ranges), None)
    where, queries, width = layout_arguments(layout), len(layout.q_tokens), widths[0]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k = random(queries, heads, width), random(layout.total, kv_heads, width)
    index = random(queries, kv_heads, widths[1]), random(layout.total, keys * widths[1])
    lse, weights = 4 + random(heads, queries).float(), random(queries).float()
    ours, plain = (
        index_operators.select(*index, None, *where, block_size, count, False, in_plain) for in_plain in (False, True)
    )
    assert torch.equal(ours, plain)
    for selected in (None, plain):
        results = []
        for in_plain in (False, True):
            leaves = [x.detach().requires_grad_() for x in index]
            sizes = block_size, width**-0.5, False, in_plain, every
            divergence = index_operators.distill(*leaves, q, k, lse, selected, *where, *sizes)
            results.append([divergence.detach(), *torch.autograd.grad(divergence, leaves, weights)])
        for name, a, b in zip(("divergence", "dq", "dk"), *results, strict=True):
            assert error(a, b.double()) < (2e-6 if dtype == torch.float32 else 2e-3), name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size", "dtype", "ranges", "every"),
    [
        (4, 2, 16, torch.float32, None, 1),
        (3, 1, 24, torch.float16, None, 3),
        (2, 2, 40, torch.float32, ((40, 70), (150, 201)), 4),
    ],
)
def test_indexers_learn_from_the_kernels_probabilities_as_in_plain_pytorch(
    heads: int,
    kv_heads: int,
    block_size: int,
    dtype: torch.dtype,
    ranges: tuple[tuple[int, int], ...] | None,
    every: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The divergence and its gradients: over the selected blocks, and over all of them."""
    monkeypatch.setitem(grid._SCORES_PER_CHUNK, "cpu", 5000)  # several chunks
    layout = layout_of([150, 0, 1, 60], "cpu")
    if ranges:
        layout = layout.part(tuple(TokenRange(*given) for given in ranges), None)
    where, queries = layout_arguments(layout), len(layout.q_tokens)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k = random(queries, heads, 64), random(layout.total, kv_heads, 64)
    index = random(queries, kv_heads, 2 * 8 + 2), random(layout.total, kv_heads * 8)  # two heads of width 8
    lse, weights = 4 + random(heads, queries).float(), random(queries).float()
    chosen = index_operators.select(*index, None, *where, block_size, 3, True, True)
    for selected in (None, chosen):
        results = []
        for in_plain in (False, True):
            leaves = [x.clone().requires_grad_() for x in index]
            sizes = block_size, 64**-0.5, True, in_plain, every
            divergence = index_operators.distill(*leaves, q, k, lse, selected, *where, *sizes)
            results.append([divergence.detach(), *torch.autograd.grad(divergence, leaves, weights)])
        for name, a, b in zip(("divergence", "dq", "dk"), *results, strict=True):
            assert error(a, b.double()) < (2e-6 if dtype == torch.float32 else 2e-3), name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size", "ranges", "every"),
    [(4, 2, 64, None, 1), (3, 1, 40, ((40, 70), (150, 201)), 1), (2, 1, 20, ((40, 70), (150, 201)), 2)],
)
def test_largest_probabilities_of_two_blocks_equal_plain_pytorch(
    heads: int, kv_heads: int, block_size: int, ranges: tuple[tuple[int, int], ...] | None, every: int
) -> None:
    layout = layout_of([150, 0, 1, 60], "cpu")
    q, k, _, _ = inputs([211], heads, kv_heads, 64, torch.float32, "cpu")
    lse = 4 + torch.randn(heads, 211, generator=torch.Generator().manual_seed(0))
    layout = layout.part(tuple(TokenRange(*given) for given in ranges), None) if ranges else layout
    rows = layout.q_tokens
    ours, plain = (
        seer_operators.attention_map(
            q[rows], k, lse[:, rows], *layout_arguments(layout), block_size, 64**-0.5, in_plain, every
        )
        for in_plain in (False, True)
    )
    assert (plain[0] > 0).any()
    torch.testing.assert_close(ours, plain, rtol=2e-5, atol=0)
