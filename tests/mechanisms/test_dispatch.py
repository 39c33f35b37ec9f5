"""Queries that travel to the owners of keys: what they send, joins other than softmax, and every block selected."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moba_train.attention.layout import Layout
from moba_train.attention.moba.gate import gate_scores
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import LocalAttention, Selection
from moba_train.attention.registry import KINDS
from moba_train.config.parallel import CPLayout
from moba_train.mechanisms.dispatch import blocks_by_unit
from moba_train.mechanisms.dispatch.blocks_by_unit import BlocksByUnit, units_of
from moba_train.mechanisms.dispatch.by_unit import OffersUnits
from moba_train.parallel.context.strategy import CPStrategy
from tests.parallel.context.context_cases import Case, assert_same, on_one_device, on_threads
from tests.thread_ranks import ThreadCommunicator

LAYOUTS = ("contiguous", "zigzag")


class WeightedBlocks(BlocksByUnit):
    """Every block has a softmax of its own; results are added up, or weighed by a softmax of the gates."""

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        (units_HTC,) = super().select(q_THD, summaries, layout)
        assert isinstance(self.attention, Weighted)
        seen = units_HTC >= 0
        own = torch.ones(*units_HTC.shape[:2], 1, dtype=torch.float64)
        if self.attention.join == "sum":
            return units_HTC, torch.cat([own, seen.double()], -1)
        assert summaries is not None
        gates = gate_scores(q_THD, summaries, "head").mul(self.attention.scale).gather(2, units_HTC.clamp(min=0).long())
        return units_HTC, torch.cat([own, gates.masked_fill(~seen, -torch.inf)], -1).softmax(-1)

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        (units_HTC,) = super().empty_selection(q_THD, k_SKD, layout)
        heads, tokens, count = units_HTC.shape
        return units_HTC, q_THD.new_empty((heads, tokens, 1 + count), dtype=torch.float64)


class Weighted(MobaAttention, OffersUnits):
    """MoBA with `WeightedBlocks`."""

    join = "sum"

    @property
    def by_unit(self) -> WeightedBlocks:
        return WeightedBlocks(self, self.options.history_blocks)


KIND_CASES: dict[str, list[dict[str, object]]] = {
    "moba": [
        {"block_size": 4, "topk": 3},
        {"block_size": 4, "topk": 4, "select": "group", "always": ("current", "first")},
    ],
    "moba_v1": [
        {"block_size": 4, "topk": 3, "merge": "sum"},
        {"block_size": 4, "topk": 3, "merge": "gate"},
        {"block_size": 4, "topk": 3, "merge": "softmax"},
    ],
    "moba_v05": [{"block_size": 4, "topk": 3}],
    "moba_window": [{"block_size": 4, "topk": 2, "window": 8}],
}
"""Options of every registered kind that is offered by the unit."""


@dataclass(frozen=True)
class KindCase(Case):
    """A registered kind."""

    kind: str = "moba"

    def attention(self) -> LocalAttention:
        *_, attention = KINDS[self.kind](KINDS[self.kind].Options(**self.options), self.head_dim).attentions
        return attention  # of moba_v05, the cross attention: its self attention is that of moba with topk 1


@dataclass(frozen=True)
class WeightedCase(Case):
    join: str = "sum"

    def attention(self) -> Weighted:
        attention = Weighted(
            MobaAttention.Options(block_size=self.block_size, topk=self.topk, backend="reference"), self.head_dim
        )
        attention.join = self.join
        return attention


def weighted_oracle(case: WeightedCase, inputs: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv in plain PyTorch, one query after the other, by autograd; weights have no gradient."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    attention, layout = case.attention(), case.layout()
    units, weights = attention.by_unit.select(inputs[0], attention.summarize(inputs[1], layout), layout)
    blocks = [
        range(start, min(start + case.block_size, stop))
        for first, stop in zip(layout.edges, layout.edges[1:], strict=False)
        for start in range(first, stop, case.block_size)
    ]
    of_token = {token: number for number, block in enumerate(blocks) for token in block}
    rows = []
    for token in range(case.total):
        for head in range(case.heads):
            attended = [(of_token[token], 0)]
            attended += [(unit, slot + 1) for slot, unit in enumerate(units[head, token].tolist()) if unit >= 0]
            row = torch.zeros(case.head_dim, dtype=torch.float64)
            for unit, slot in attended:
                keys = [key for key in blocks[unit] if key <= token]
                kv = head // (case.heads // case.kv_heads)
                scores = k[keys, kv] @ q[token, head] * attention.scale
                row = row + weights[head, token, slot] * (scores.softmax(0) @ v[keys, kv])
            rows.append(row)
    out = torch.stack(rows).view(case.total, case.heads, case.head_dim)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def test_every_kind_that_is_offered_by_the_unit_is_tested_here() -> None:
    kinds = {name: kind(kind.Options(), 16).attentions for name, kind in KINDS.items()}
    assert {name for name, some in kinds.items() if some and all(map(units_of, some))} == set(KIND_CASES)


@pytest.mark.parametrize(
    ("kind", "options"), [(kind, options) for kind, several in KIND_CASES.items() for options in several]
)
def test_every_kind_is_joined_as_on_one_device(kind: str, options: dict[str, object]) -> None:
    """A kind that inherits from another one is not offered by the unit with the other's join."""
    case = KindCase((21, 0, 1, 18), kind=kind, options=options)
    inputs = case.inputs()
    assert_same(
        on_threads(CPStrategy(3, "dispatch", "zigzag", 3), case, inputs).tensors, on_one_device(case, inputs).tensors
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("join", ["sum", "gate"])
@pytest.mark.parametrize("lengths", [(12, 0, 1, 21), (9,)], ids=["documents", "a rank without tokens"])
def test_blocks_with_a_softmax_each_are_added_up_or_weighed(
    lengths: tuple[int, ...], join: str, layout: CPLayout
) -> None:
    case = WeightedCase(lengths, join=join)
    inputs = case.inputs()
    want = weighted_oracle(case, inputs)
    got = on_threads(CPStrategy(4, "dispatch", layout, 4), case, inputs)
    out, lse, *grads = got.tensors
    moba = on_one_device(Case(case.lengths), inputs)
    assert_same([out, lse, *grads], [want[0], moba.tensors[1], *want[1:]])
    assert (out - moba.tensors[0]).abs().max() > 0.1, "a softmax over all blocks would have passed"


def test_where_moba_takes_dense_attention_every_block_is_selected() -> None:
    case = Case((16, 9, 1, 14), topk=4, backend="auto")
    inputs = case.inputs()
    want, got = (on_one_device(case, inputs), on_threads(CPStrategy(3, "dispatch", "contiguous", 3), case, inputs))
    assert want.selected is None
    assert_same(got.tensors, want.tensors)
    assert got.selected is not None
    assert got.selected.shape == (40, 4, 3)
    assert [(row >= 0).sum().item() for row in got.selected[:16, 0]] == [i // 4 for i in range(16)]


def test_many_queries_are_attended_to_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((37, 6))
    inputs = case.inputs()
    strategy = CPStrategy(2, "dispatch", "zigzag", 2)
    whole = on_threads(strategy, case, inputs).tensors
    monkeypatch.setattr(blocks_by_unit, "_ENTRIES_AT_ONCE", 5)
    for joined in (case, WeightedCase((37, 6))):
        want = whole if joined is case else weighted_oracle(WeightedCase((37, 6)), inputs)
        got = on_threads(strategy, joined, inputs).tensors
        assert_same(got, want if joined is case else [want[0], got[1], *want[1:]])


def test_a_query_of_a_head_goes_to_a_rank_once_and_keys_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every block selected, the queries of rank 1 go to rank 0 once, forward and backward, whatever topk is."""
    case = Case((32,), topk=9, head_dim=16)
    messages: list[tuple[int, list[int], tuple[int, ...]]] = []
    exchange = ThreadCommunicator.all_to_all_uneven

    def recorded(communicator: ThreadCommunicator, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        messages.append((communicator.rank, sent, x.shape[1:]))
        return exchange(communicator, x, sent, received)

    monkeypatch.setattr(ThreadCommunicator, "all_to_all_uneven", recorded)
    on_threads(CPStrategy(2, "dispatch", "contiguous", 2), case, case.inputs())
    queries = [sent for rank, sent, shape in messages if rank == 1 and shape == (8,)]  # with the ids of 8 blocks
    assert queries == [[32, 24]] * 4  # two key/value heads with two query heads each, two passes
    kinds = {shape for _, _, shape in messages}
    assert kinds == {(8,), (16,), (2, 16), ()}, "ids; q, out, dq; dout and out; lse: no keys"


def test_an_attention_that_is_not_offered_by_the_unit_is_gathered() -> None:
    """Evaluations compare with full attention on the same ranks."""
    case = Case((20, 9), topk=None)
    got = on_threads(CPStrategy(3, "dispatch", "zigzag", 3), case, case.inputs())
    assert_same(got.tensors, on_one_device(case, case.inputs()).tensors)


def test_a_kernel_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_by_unit, "best_kernel", lambda *_: None)
    case = Case((20,))
    with pytest.raises(ValueError, match=r"parallel\.cp_transport: 'dispatch' attends with varlen kernels, and none"):
        on_threads(CPStrategy(2, "dispatch", "zigzag", 2), case, case.inputs())
