"""How the selected blocks are spread, against counting in the reference's mask, one query and one key at a time."""

import math
import re
from collections import Counter
from pathlib import Path

import oracle
import pytest
import torch
from helpers import make_qkv
from torch import Tensor

from moba_train.attention.blocks.reference import selected_mask
from moba_train.attention.moba.attention import MobaAttention
from moba_train.attention.moba.statistics import routing_statistics
from moba_train.attention.observer import mean_statistics
from moba_train.attention.protocol import Layout, packed_layout

BLOCK = 4
LENGTHS = [37, 0, 3, 22, 12]


def counted(mask_HTS: Tensor, tokens: list[int], lengths: list[int], topk: int, always: tuple[str, ...]) -> dict:
    """The numbers of `routing_statistics` from an attention mask of the queries `tokens`, by their definitions."""
    blocks = oracle.cut_blocks(lengths, BLOCK)
    loads: dict[tuple[int, int], Counter[int]] = {}
    candidates: dict[int, set[int]] = {}
    distances, on_first = [], []
    for head, mask_TS in enumerate(mask_HTS.tolist()):
        for token, mask_S in zip(tokens, mask_TS, strict=True):
            own, free = oracle.history(lengths, BLOCK, token)
            if len(free) <= topk - 1:
                continue
            document, first = blocks[own][2], free[0]
            forced = {own - 1} if "previous" in always else set()
            forced |= {first} if "first" in always else set()
            free = [block for block in free if block not in forced]
            selected = [block for block in free if all(mask_S[slice(*blocks[block][:2])])]
            candidates.setdefault(document, set()).update(free)
            loads.setdefault((document, head), Counter()).update(selected)
            distances += [(own - block) / (sum(own - other for other in free) / len(free)) for block in selected]
            on_first += [first in selected] if selected else []
    weights = {of: load.total() for of, load in loads.items()}
    total = sum(weights.values())
    if total == 0:
        return {}
    imbalance = entropy = 0.0
    for (document, head), load in loads.items():
        n, weight = len(candidates[document]), weights[document, head]
        imbalance += weight * max(load.values()) / (weight / n)
        entropy += weight * sum(-x / weight * math.log(x / weight) for x in load.values()) / math.log(n)
    return {
        "selected": total,
        "load_imbalance": imbalance / total,
        "entropy": entropy / total,
        "first_block_share": sum(on_first) / len(on_first),
        "distance": sum(distances) / total,
    }


def build(topk: int, **options) -> MobaAttention:
    return MobaAttention(MobaAttention.Options(block_size=BLOCK, topk=topk, **options), 8)


def statistics_of(attention: MobaAttention, q: Tensor, k: Tensor, whole: Layout, ranges=None) -> tuple[dict, Tensor]:
    """The description of what the queries in `ranges` select, and the selected blocks."""
    part = whole.part(ranges, None)
    selection = attention.select(q[part.q_tokens], attention.summarize(k, whole), part)
    return attention.describe_selection(selection, part), selection[0]


@pytest.mark.parametrize("ranges", [None, ((5, 20), (34, 60))], ids=["all queries", "a shard"])
@pytest.mark.parametrize(
    ("topk", "options"),
    [
        (3, {}),
        (2, {}),
        (4, {"select": "group"}),
        (3, {"always": ("current", "previous")}),
        (3, {"always": ("first",)}),
        (4, {"always": ("current", "previous", "first")}),
        (3, {"always": ("current", "previous", "first")}),
        (1, {}),
        (8, {}),
        (10, {"backend": "reference"}),
    ],
)
def test_they_are_what_counting_gives(topk, options, ranges, device):
    q, k, _ = (x.detach() for x in make_qkv(sum(LENGTHS), 4, 2, 8, device))
    whole = packed_layout(LENGTHS, device)
    found, selected = statistics_of(build(topk, **options), q, k, whole, ranges)
    part = whole.part(ranges, None)
    mask = selected_mask(selected, part, BLOCK)(slice(0, selected.shape[1]), slice(0, whole.total))
    want = counted(mask, part.q_tokens.tolist(), LENGTHS, topk, options.get("always", ()))
    assert found == pytest.approx(want, rel=1e-6)
    assert bool(want) == (topk not in (1, 10) and (topk, options.get("always", ())[2:]) != (3, ("first",)))


def test_where_every_block_is_selected_there_is_nothing_to_tell(device):
    q, k, _ = (x.detach() for x in make_qkv(60, 2, 1, 8, device))
    whole = packed_layout([60], device)
    attention = build(15)
    assert attention.describe_selection(attention.select(q, attention.summarize(k, whole), whole), whole) == {}


def test_a_gate_that_collapses_onto_one_block_is_seen(device):
    """All queries fit the first block best: 15 candidates, of which one has all selections."""
    whole = packed_layout([64], device)
    q, k = (torch.zeros(64, 1, 8, device=device) for _ in range(2))
    q[..., 0] = k[:BLOCK, :, 0] = 1
    found, _ = statistics_of(build(2), q, k, whole)
    assert found == {
        "selected": 14 * BLOCK,  # of queries in the third block and later
        "load_imbalance": 15,
        "entropy": 0,
        "first_block_share": 1,
        "distance": pytest.approx(sum(i / ((i + 1) / 2) for i in range(2, 16)) / 14),
    }


def test_selecting_at_random_gives_what_the_guide_says(device):
    """8 of 64 blocks are selected; early blocks are candidates of more queries, so a random selection is not even."""
    own_T = torch.arange(64 * 16) // 16
    luck_HTN = torch.rand(4, 64 * 16, 64, generator=torch.Generator().manual_seed(0))
    best = luck_HTN.masked_fill(torch.arange(64) >= own_T[:, None], -1).topk(7)
    selected = torch.where(best.values < 0, -1, best.indices).to(device, torch.int32)
    options = {"block_size": 16, "topk": 8, "always": ("current",)}
    found = routing_statistics(selected, packed_layout([64 * 16], device), **options)
    guide = (Path(__file__).parents[2] / "docs" / "run-health.md").read_text()
    told = {
        name: float(at_random)
        for name, at_random in re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) \|$", guide, re.MULTILINE)
    }
    for name, value in found.items():
        assert name == "selected" or float(told[name]) == pytest.approx(value, rel=0.05), name


def test_weights_that_became_nan_leave_finite_numbers(device):
    q, k, _ = (x.detach() for x in make_qkv(64, 2, 1, 8, device))
    q[20:] = torch.nan
    found, _ = statistics_of(build(3), q, k, packed_layout([64], device))
    assert all(map(math.isfinite, found.values()))


def test_descriptions_of_parts_join_by_their_selections():
    one = {"selected": 10, "entropy": 0.5}
    assert mean_statistics([one, {"selected": 30, "entropy": 0.9}, {}, None]) == {"selected": 40, "entropy": 0.8}
    assert mean_statistics([{}, None]) is None
