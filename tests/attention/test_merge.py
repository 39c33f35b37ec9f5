"""Partial results joined by online softmax: exact, order-free, and safe where one side or both saw nothing."""

import pytest
import torch

from moba_train.attention.kernels.common.merge import merge, merge_into
from tests.attention.helpers import Pair

T, H, D = 5, 3, 4


def softmax_over(scores_HTS: torch.Tensor, v_SHD: torch.Tensor, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    scores = scores_HTS[..., keys]
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v_SHD[keys]), scores.logsumexp(-1)


Partials = tuple[Pair, list[Pair]]


@pytest.fixture
def partials(device: torch.device | str) -> Partials:
    """Scores with row-wise offsets, values, and the partial results over keys 0..2, 3..6 and 7..8."""
    generator = torch.Generator().manual_seed(0)
    scores = (10 * torch.randn(H, T, 9, dtype=torch.float64, generator=generator)).to(device)
    v = torch.randn(9, H, D, dtype=torch.float64, generator=generator).to(device)
    return softmax_over(scores, v, slice(None)), [softmax_over(scores, v, s) for s in map(slice, (0, 3, 7), (3, 7, 9))]


def test_two_disjoint_sets_of_keys_merge_to_their_union(partials: Partials) -> None:
    whole, (a, b, c) = partials
    torch.testing.assert_close(merge(*merge(*a, *b), *c), whole, rtol=0, atol=1e-14)


def test_merging_in_place_is_merging(partials: Partials) -> None:
    """From nothing on, into a wider dtype, as a ring does."""
    _, parts = partials
    want = torch.zeros(T, H, D, dtype=torch.float64), torch.full((H, T), -torch.inf, dtype=torch.float64)
    want = want[0].to(parts[0][0].device), want[1].to(parts[0][0].device)
    got = want[0].clone(), want[1].clone()
    for out, lse in parts:
        want = merge(*want, out.float(), lse)
        merge_into(*got, out.float(), lse)
        torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)


def test_order_and_grouping_do_not_matter(partials: Partials) -> None:
    _, (a, b, c) = partials
    torch.testing.assert_close(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), rtol=0, atol=1e-14)
    torch.testing.assert_close(merge(*a, *b), merge(*b, *a), rtol=0, atol=0)


def test_an_empty_side_changes_nothing(partials: Partials) -> None:
    _, (a, _, _) = partials
    empty = torch.zeros_like(a[0]), torch.full_like(a[1], -torch.inf)
    torch.testing.assert_close(merge(*a, *empty), a, rtol=0, atol=0)
    torch.testing.assert_close(merge(*empty, *a), a, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_two_empty_sides_stay_empty_and_never_become_nan(dtype: torch.dtype, device: torch.device) -> None:
    out = torch.zeros(T, H, D, dtype=dtype, device=device)
    lse = torch.full((H, T), -torch.inf, device=device)
    got_out, got_lse = merge(out, lse, out, lse)
    assert torch.equal(got_out, out)
    assert torch.equal(got_lse, lse)


@pytest.mark.parametrize("gap", [-200.0, 200.0])
@pytest.mark.parametrize("level", [-1e4, 0.0, 1e4])
def test_gaps_of_200_neither_overflow_nor_lose_the_larger_side(gap: float, level: float, device: torch.device) -> None:
    """float32, as in training: exp(200) is beyond its range, and so is exp(level)."""
    a, b = (torch.full((T, H, D), x, device=device) for x in (1.0, -1.0))
    lse_a = torch.full((H, T), level, device=device)
    out, lse = merge(a, lse_a, b, lse_a + gap)
    assert torch.equal(out, b if gap > 0 else a)
    assert torch.equal(lse, lse_a + max(gap, 0))


def test_weights_are_float32_and_the_result_is_rounded_once_to_the_outputs_dtype(device: torch.device) -> None:
    a = torch.full((1, 1, 1), 1.0, dtype=torch.bfloat16, device=device)
    b = torch.full((1, 1, 1), 3.0, dtype=torch.bfloat16, device=device)
    lse_a, lse_b = (torch.tensor([[x]], device=device).log() for x in (0.6, 0.4))
    for out, lse in (merge(a, lse_a, b, lse_b), in_place(a, lse_a, b, lse_b)):
        assert out.dtype == torch.bfloat16
        assert out.item() == torch.tensor(1.8).to(torch.bfloat16).item()
        assert lse.item() == pytest.approx(0.0, abs=1e-6)


def in_place(out: torch.Tensor, lse: torch.Tensor, partial: torch.Tensor, partial_lse: torch.Tensor) -> Pair:
    """`merge` by `merge_into`."""
    merged = out.clone(), lse.clone()
    merge_into(*merged, partial, partial_lse)
    return merged
