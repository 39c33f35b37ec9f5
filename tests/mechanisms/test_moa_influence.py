"""Influences by blocks, what a rule masks of them, and the spans that heads get for them."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moba_train.errors import UserError
from moba_train.mechanisms.moa.spans import SpanRule
from moba_train.tools.profile_spans import block_influence, candidate_rules, choose_spans, densities, masked_influence
from tests.mechanisms.test_moa import attended

TOKENS, SIZES = 61, {"block_size": 4, "sink_tokens": 3, "max_length": 64}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def tensors() -> list[torch.Tensor]:
    """q, k, v and dout of 4 heads, 2 of which share keys."""
    return [random(TOKENS, heads, 8, seed=seed) for seed, heads in enumerate((4, 2, 2, 4))]


def test_each_influence_is_the_change_of_the_output_times_its_gradient(tensors: list[torch.Tensor]) -> None:
    q, k, v, dout = tensors
    got = block_influence(*tensors, scale=0.35, block_size=1)
    for head, query, key in [(0, 0, 0), (1, 1, 0), (3, 7, 7), (2, 60, 0), (1, 40, 39), (0, 40, 12)]:
        scores = 0.35 * k[: query + 1, head // 2] @ q[query, head]
        values = v[: query + 1, head // 2]
        out = scores.softmax(0) @ values
        scores[key] = -torch.inf
        masked = scores.softmax(0) @ values if query else torch.zeros(8, dtype=torch.float64)
        torch.testing.assert_close(got[head, query, key], dout[query, head] @ (masked - out), rtol=1e-10, atol=0)
    assert (got.triu(1) == 0).all()


def test_blocks_hold_the_sums(tensors: list[torch.Tensor]) -> None:
    single = block_influence(*tensors, scale=0.35, block_size=1)
    want = torch.nn.functional.pad(single, (0, 3, 0, 3)).unflatten(1, (16, 4)).unflatten(3, (16, 4)).sum((2, 4))
    torch.testing.assert_close(block_influence(*tensors, scale=0.35, block_size=4), want, rtol=0, atol=1e-12)


def test_a_row_with_all_its_mass_on_one_key_stays_finite() -> None:
    q, k, v, dout = (random(9, 1, 8, seed=seed).float() for seed in range(4))
    assert block_influence(500 * q, k, v, dout, scale=1, block_size=3).isfinite().all()


def test_a_rule_masks_what_it_does_not_attend_to(tensors: list[torch.Tensor]) -> None:
    single = block_influence(*tensors, scale=0.35, block_size=1)
    blocks = block_influence(*tensors, scale=0.35, block_size=4)
    rules = [
        SpanRule.fitted(4, 0.0, **SIZES),
        SpanRule.fitted(-9, 0.5, **SIZES),
        SpanRule(10, 0.25, 16, 1),
        SpanRule.fitted(0, 1.0, **SIZES),
    ]
    got = masked_influence(blocks, rules, 4)
    for at, rule in enumerate(rules):
        outside = ~attended(TOKENS, rule.alpha, rule.beta, rule.block_size, 3)
        torch.testing.assert_close(got[:, at], (single * outside).sum((1, 2)), rtol=0, atol=1e-12)


def test_candidates_lie_between_a_block_and_the_document() -> None:
    rules = candidate_rules((16, 64), **SIZES)
    assert len(set(rules)) == len(rules)
    assert [(rule.alpha, rule.beta) for rule in rules if not rule.block_size] == [(0, 1.0)]
    for rule in rules:
        assert rule.alpha + rule.beta * 16 >= 4
        assert rule.alpha + rule.beta * 64 <= 64
    assert any(rule.alpha < 0 for rule in rules)
    longer = candidate_rules((16, 64), **SIZES | {"max_length": 4096})
    assert max(rule.block_size for rule in longer) == 256  # a span of 3584 + 32 tokens has 32 blocks at most
    assert densities(rules, (16, 64))[:, -1].tolist() == [1.0, 1.0]


def test_a_head_that_looks_close_by_gets_a_short_span_and_one_that_looks_far_a_long_one() -> None:
    """Each head finds what lowers the loss one token before the query, or halfway back to the document's start."""
    tokens = 64
    target = torch.stack([torch.arange(tokens) - 1, torch.arange(tokens) // 2]).clamp(min=0)  # [head, query]
    keys = torch.eye(tokens, dtype=torch.float64)
    values = random(tokens, tokens)
    q = 12 * keys[target].transpose(0, 1)
    dout = -values[target].transpose(0, 1)
    k, v = (x.unsqueeze(1).expand(-1, 2, -1) for x in (keys, values))
    influence = block_influence(q, k, v, dout, scale=1, block_size=4)
    rules = candidate_rules((tokens,), **SIZES)
    masked = masked_influence(influence, rules, 4)
    density = densities(rules, (tokens,))
    near, far = (rules[chosen] for chosen in choose_spans(masked[None], density, 0.6))
    assert near.alpha + near.beta * tokens <= 8
    assert far.alpha + far.beta * tokens >= 32
    assert masked[1, rules.index(far)].abs() < 1e-2 * masked[1].max()


@pytest.mark.parametrize("seed", range(6))
def test_no_change_of_one_head_is_better_within_the_budget(seed: int) -> None:
    """And no choice at all, where the price alone spends the budget."""
    heads, candidates, lengths, budget = 4, 5, 2, 0.45
    density = random(lengths, candidates, seed=seed).abs().clamp(max=1).sort(1).values * 0.9
    density[:, 0] = 0.05
    masked = random(lengths, heads, candidates, seed=seed + 10).abs().sort(2, descending=True).values
    loss = masked.mean(0)
    chosen = choose_spans(masked, density, budget)

    def within(choice: Sequence[int] | Tensor) -> bool:
        return bool((density[:, list(choice)].mean(1) <= budget).all())

    def total(choice: Sequence[int] | Tensor) -> float:
        return sum(loss[head, candidate].item() for head, candidate in enumerate(choice))

    assert within(chosen)
    for head, candidate in itertools.product(range(heads), range(candidates)):
        other = chosen.clone()
        other[head] = candidate
        assert not within(other) or total(other) >= total(chosen) - 1e-12
    best = min(total(choice) for choice in itertools.product(range(candidates), repeat=heads) if within(choice))
    nothing = total([0] * heads)
    assert total(chosen) - best <= 0.2 * (nothing - best)


def test_a_budget_of_one_gives_each_head_what_masks_least() -> None:
    masked, density = random(2, 5, 7), torch.linspace(0.1, 1, 7, dtype=torch.float64).repeat(2, 1)
    assert torch.equal(choose_spans(masked, density, 1.0), masked.mean(0).argmin(1))


def test_a_budget_that_nothing_fits_says_what_would() -> None:
    density = torch.tensor([[0.2, 0.5], [0.1, 0.4]], dtype=torch.float64)
    with pytest.raises(UserError, match=r"--budget: given 0.15; allowed: at least 0.2, which the narrowest"):
        choose_spans(random(2, 3, 2), density, 0.15)
