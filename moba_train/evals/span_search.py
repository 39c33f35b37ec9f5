"""Which span each head gets: candidates, what they would mask, and a choice that keeps to a budget.

Shape suffixes: L lengths of documents, X heads of all layers, C candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moba_train.attention.moa.spans import SpanRule
from moba_train.errors import UserError

_BETA_STEPS = 8
_BISECTIONS = 100


def candidate_rules(
    lengths: Sequence[int], *, block_size: int, sink_tokens: int, max_length: int
) -> tuple[SpanRule, ...]:
    """Spans from a block to the whole of a document: alpha a block, 2, 4, ... of them, 0, or a negative eighth or
    quarter of the longest length; beta in eighths.

    Each is at least a block in the shortest document and at most the longest one. The last one is full attention.
    """
    shortest, longest = min(lengths), max(lengths)
    powers = [block_size << power for power in range((longest // block_size).bit_length())]
    alphas = [-longest // 4, -longest // 8, 0, *powers]
    sizes = {"block_size": block_size, "sink_tokens": sink_tokens, "max_length": max_length}
    found = [
        SpanRule.fitted(alpha, step / _BETA_STEPS, **sizes)
        for alpha in alphas
        for step in range(_BETA_STEPS)
        if alpha + step / _BETA_STEPS * shortest >= block_size and alpha + step / _BETA_STEPS * longest <= longest
    ]
    return (*(rule for rule in found if rule.block_size), SpanRule.fitted(0, 1.0, **sizes))


def densities(rules: Sequence[SpanRule], lengths: Sequence[int]) -> Tensor:
    """float64 [L, C]: pairs of a query and a key that are attended to, as a share of full attention's."""
    rows = [[rule.attended_pairs(torch.tensor([length])) * 2 / length**2 for rule in rules] for length in lengths]
    return torch.tensor(rows, dtype=torch.float64)


def choose_spans(masked_LXC: Tensor, density_LC: Tensor, budget: float) -> Tensor:
    """int64 [X]: a candidate for each head, so that the mean density is within the budget at every length.

    Each head takes the candidate with the lowest sum of masked influence (mean over the lengths) and a price times its
    density; the price is the lowest that keeps to the budget (bisection). What is left of the budget then goes, head by
    head, to the changes that lower the influence most for their density. Raises UserError for a budget that the
    narrowest candidates exceed.
    """
    heads = masked_LXC.shape[1]
    density_C = density_LC.mean(0)
    order_C = density_C.argsort(stable=True)  # of equal candidates the narrowest wins
    loss_XC = masked_LXC.mean(0)[:, order_C]
    density_LC, density_C = density_LC[:, order_C], density_C[order_C]

    def cheapest(price: float) -> Tensor:
        return (loss_XC + price * density_C).argmin(1)

    def fits(chosen_X: Tensor) -> bool:
        return bool((density_LC[:, chosen_X].mean(1) <= budget + 1e-12).all())

    if not fits(torch.zeros(heads, dtype=torch.int64)):
        least = float(density_LC[:, 0].max())
        raise UserError(f"--budget: given {budget:g}; allowed: at least {least:.3g}, which the narrowest spans need")
    low, high = 0.0, 1.0
    while not fits(cheapest(high)):
        high *= 4
    if not fits(cheapest(low)):
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(cheapest(middle)) else (middle, high)
        low = high
    return order_C[_spend_the_rest(cheapest(low), loss_XC, density_LC, budget)]


def _spend_the_rest(chosen_X: Tensor, loss_XC: Tensor, density_LC: Tensor, budget: float) -> Tensor:
    """Change one head after the other while a change lowers the loss and fits the budget: most per density first."""
    heads = len(chosen_X)
    head_X = torch.arange(heads)
    while True:
        gain_XC = loss_XC[head_X, chosen_X, None] - loss_XC
        more_LXC = density_LC[:, None, :] - density_LC[:, chosen_X, None]
        room_L11 = (budget * heads - density_LC[:, chosen_X].sum(1)).view(-1, 1, 1)
        allowed_XC = (gain_XC > 0) & (more_LXC <= room_L11 + 1e-12).all(0)
        if not allowed_XC.any():
            return chosen_X
        rate_XC = gain_XC / more_LXC.mean(0).clamp(min=1e-12)
        best = int(torch.where(allowed_XC, rate_XC, -torch.inf).argmax())
        head, candidate = divmod(best, loss_XC.shape[1])
        chosen_X = torch.where(head_X == head, candidate, chosen_X)
