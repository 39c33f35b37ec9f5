"""Queries that travel to the owners of keys: what they send, every kind's join, and every block selected."""

from dataclasses import dataclass

import pytest
from torch import Tensor

from moba_train.attention.protocol import LocalAttention
from moba_train.attention.registry import KINDS
from moba_train.mechanisms.dispatch import blocks_by_unit
from moba_train.mechanisms.dispatch.blocks_by_unit import units_of
from moba_train.parallel.context.strategy import CPStrategy
from tests.parallel.context.context_cases import Case, assert_same, on_one_device, on_threads
from tests.thread_ranks import ThreadCommunicator

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


def test_every_kind_that_is_offered_by_the_unit_is_tested_here() -> None:
    kinds = {name: kind(kind.Options(), 16).attentions for name, kind in KINDS.items()}
    assert {name for name, some in kinds.items() if some and all(map(units_of, some))} == set(KIND_CASES)


@pytest.mark.parametrize(
    ("lengths", "strategy"),
    [
        ((21, 0, 1, 18), CPStrategy(3, "dispatch", "zigzag", 3)),
        ((12, 0, 1, 21), CPStrategy(4, "dispatch", "contiguous", 4)),
        ((9,), CPStrategy(4, "dispatch", "contiguous", 4)),
    ],
    ids=["zigzag", "contiguous", "a rank without tokens"],
)
@pytest.mark.parametrize(
    ("kind", "options"), [(kind, options) for kind, several in KIND_CASES.items() for options in several]
)
def test_every_kind_is_joined_as_on_one_device(
    kind: str, options: dict[str, object], lengths: tuple[int, ...], strategy: CPStrategy
) -> None:
    """A kind that inherits from another one is not offered by the unit with the other's join."""
    case = KindCase(lengths, kind=kind, options=options)
    inputs = case.inputs()
    assert_same(on_threads(strategy, case, inputs).tensors, on_one_device(case, inputs).tensors)


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
    monkeypatch.setattr(blocks_by_unit, "_ENTRIES_AT_ONCE", 5)
    for case in (Case((37, 6)), KindCase((37, 6), kind="moba_v1", options=KIND_CASES["moba_v1"][1])):
        inputs = case.inputs()
        got = on_threads(CPStrategy(2, "dispatch", "zigzag", 2), case, inputs).tensors
        assert_same(got, on_one_device(case, inputs).tensors)


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
