"""How the selected blocks are spread, against counting in the reference's mask, one query and one key at a time."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.block_sparse import DenseOrSparse
from moba_train.attention.kernels.common.reference import selected_mask
from moba_train.attention.kernels.common.selection import Choice, routing_statistics
from moba_train.attention.layout import Layout, TokenRanges, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from tests.attention import oracle
from tests.attention.helpers import make_qkv, ranges

BLOCK = 4
LENGTHS = [37, 0, 3, 22, 12]


def counted(mask_HTS: Tensor, tokens: list[int], lengths: list[int], choice: Choice) -> dict[str, Any]:
    """The statistics of an attention mask of the queries `tokens`, by their definitions."""
    blocks = oracle.cut_blocks(lengths, BLOCK)
    loads: dict[tuple[int, int], Counter[int]] = {}
    candidates: dict[int, set[int]] = {}
    distances, on_first = [], []
    seen = attended = 0
    for head, mask_TS in enumerate(mask_HTS.tolist()):
        for token, mask_S in zip(tokens, mask_TS, strict=True):
            own, history = oracle.history(lengths, BLOCK, token)
            position = token - blocks[(history or [own])[0]][0]
            seen += position + 1
            attended += sum(mask_S)
            if len(history) <= choice.topk - 1 or position < choice.dense_len:
                continue
            document = blocks[own][2]
            free = history[choice.first : len(history) - choice.local + 1]
            selected = [block for block in free if all(mask_S[slice(*blocks[block][:2])])]
            candidates.setdefault(document, set()).update(free)
            loads.setdefault((document, head), Counter()).update(selected)
            distances += [(own - block) / (sum(own - other for other in free) / len(free)) for block in selected]
            on_first += [history[0] in selected] if selected else []
    weights = {of: load.total() for of, load in loads.items()}
    total = sum(weights.values())
    share = {"key_share": attended / seen, "selected": total}
    if total == 0:
        return share
    imbalance = entropy = 0.0
    for (document, head), load in loads.items():
        n, weight = len(candidates[document]), weights[document, head]
        imbalance += weight * max(load.values()) / (weight / n)
        entropy += weight * sum(-x / weight * math.log(x / weight) for x in load.values()) / math.log(n)
    return share | {
        "load_imbalance": imbalance / total,
        "entropy": entropy / total,
        "first_block_share": sum(on_first) / len(on_first),
        "distance": sum(distances) / total,
    }


def build(topk: int, **options: Any) -> MobaAttention:
    return MobaAttention(MobaAttention.Options(block_size=BLOCK, topk=topk, **options), 8)


def statistics_of(
    attention: DenseOrSparse, q: Tensor, k: Tensor, whole: Layout, q_ranges: TokenRanges | None = None
) -> tuple[dict[str, Any], Tensor | None]:
    """The description of what the queries in `q_ranges` select, with the number of free selections, and the selected
    blocks."""
    part = whole.part(q_ranges, None)
    selection = attention.select(q[part.q_tokens], attention.summarize(k, whole), part)
    found = attention.describe_selection(selection, part)
    chosen = attention.selected_by(torch.arange(part.queries, device=q.device), selection, part)
    return found.values | {"selected": found.weights.get("entropy", 0)}, None if chosen is None else chosen.ids_HnC


@pytest.mark.parametrize("q_ranges", [None, ranges((5, 20), (34, 60))], ids=["all queries", "a shard"])
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
def test_they_are_what_counting_gives(
    topk: int, options: dict[str, Any], q_ranges: TokenRanges | None, device: torch.device
) -> None:
    q, k, _ = (x.detach() for x in make_qkv(sum(LENGTHS), 4, 2, 8, device))
    always = options.get("always", ())
    choice = Choice(BLOCK, topk, int("first" in always), 1 + ("previous" in always))
    want = compare(build(topk, **options), q, k, choice, q_ranges)
    assert bool(want["selected"]) == (topk not in (1, 10) and (topk, always[2:]) != (3, ("first",)))


def compare(
    attention: DenseOrSparse, q: Tensor, k: Tensor, choice: Choice, q_ranges: TokenRanges | None, alike: int = 1
) -> dict[str, Any]:
    """The counted statistics, which must be the attention's; of `alike` query heads that share keys it counts one."""
    whole = packed_layout(LENGTHS, q.device)
    found, selected = statistics_of(attention, q, k, whole, q_ranges)
    assert selected is not None
    part = whole.part(q_ranges, None)
    mask = selected_mask(selected, part, BLOCK)(slice(0, selected.shape[1]), slice(0, whole.total))
    want = counted(mask, part.q_tokens.tolist(), LENGTHS, choice)
    assert found == pytest.approx(want | {"selected": want["selected"] / alike}, rel=1e-6)
    return want


def test_where_every_block_is_selected_all_keys_are_attended_to(device: torch.device) -> None:
    q, k, _ = (x.detach() for x in make_qkv(60, 2, 1, 8, device))
    assert statistics_of(build(15), q, k, packed_layout([60], device)) == ({"key_share": 1.0, "selected": 0}, None)


def test_a_gate_that_collapses_onto_one_block_is_seen(device: torch.device) -> None:
    """All queries fit the first block best: 15 candidates, of which one has all selections."""
    whole = packed_layout([64], device)
    q, k = (torch.zeros(64, 1, 8, device=device) for _ in range(2))
    q[..., 0] = k[:BLOCK, :, 0] = 1
    found, _ = statistics_of(build(2), q, k, whole)
    assert found.pop("key_share") == pytest.approx(400 / 2080)
    assert found == {
        "selected": 14 * BLOCK,  # of queries in the third block and later
        "load_imbalance": 15,
        "entropy": 0,
        "first_block_share": 1,
        "distance": pytest.approx(sum(i / ((i + 1) / 2) for i in range(2, 16)) / 14),
    }


def test_selecting_at_random_gives_what_the_guide_says(device: torch.device) -> None:
    """8 of 64 blocks are selected; early blocks are candidates of more queries, so a random selection is not even."""
    own_T = torch.arange(64 * 16) // 16
    luck_HTN = torch.rand(4, 64 * 16, 64, generator=torch.Generator().manual_seed(0))
    best = luck_HTN.masked_fill(torch.arange(64) >= own_T[:, None], -1).topk(7)
    selected = torch.where(best.values < 0, -1, best.indices).to(device, torch.int32)
    found = routing_statistics(selected, packed_layout([64 * 16], device), Choice(block_size=16, topk=8)).values
    guide = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    told = {
        name: float(at_random)
        for name, at_random in re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) \|$", guide, re.MULTILINE)
    }
    assert found == pytest.approx({name: told[name] for name in found}, rel=0.05)


def test_weights_that_became_nan_leave_finite_numbers(device: torch.device) -> None:
    q, k, _ = (x.detach() for x in make_qkv(64, 2, 1, 8, device))
    q[20:] = torch.nan
    found, _ = statistics_of(build(3), q, k, packed_layout([64], device))
    assert all(map(math.isfinite, found.values()))
