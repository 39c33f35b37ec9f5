"""Sliding windows against a mask, in several tiles; the LocalAttention contract is in test_local_attention.py."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from moba_train.attention.engine import LOCAL_ENGINE, Engine
from moba_train.attention.kernels.common.reference import masked_attend, masked_attend_backward
from moba_train.attention.kernels.varlen import Segments
from moba_train.attention.layout import Layout, TokenRange, packed_layout
from moba_train.attention.protocol import BackwardState
from moba_train.attention.registry import KINDS
from moba_train.mechanisms import window
from moba_train.mechanisms.window import WindowAttention, WindowKind, bands, sink_bands
from moba_train.mechanisms.window_edges import WindowExchange, edges
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPLayout, CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from moba_train.parallel.context.transport.ring import Ring
from moba_train.parallel.stage_strategy import stage_costs
from tests.attention.helpers import make_qkv, triple
from tests.attention.kind_checks import (
    MODEL,
    STRATEGIES,
    assert_ranks_equal_one_device,
    make_layer,
)
from tests.attention.test_sink import assert_near_float64, with_sink
from tests.parallel.test_stage_strategy import stage_of


@pytest.mark.parametrize("width", [1, 3, 7, 100])
@pytest.mark.parametrize("tile", [1, 4, 50])
def test_bands_have_every_pair_in_a_window_once_and_no_key_outside_of_it(width: int, tile: int) -> None:
    q_ranges = (TokenRange(2, 9), TokenRange(9, 14), TokenRange(20, 31))
    k_ranges = (TokenRange(0, 8), TokenRange(11, 25))
    queries, keys = ([token for part in ranges for token in range(*part)] for ranges in (q_ranges, k_ranges))
    found = []
    for band in bands(q_ranges, k_ranges, width, tile):
        assert band.queries.stop - band.queries.start <= tile
        assert queries[band.rows] == list(range(*band.queries))
        assert keys[band.key_rows] == list(range(*band.keys))
        assert band.keys.start > band.queries.start - width
        if band.fits_kernels:  # kernels align the last query with the last key
            assert band.keys.start <= band.queries.start
        else:
            assert band.queries.stop - band.queries.start < width
        found += [(q, k) for q in range(*band.queries) for k in range(*band.keys) if 0 <= q - k < width]
    assert sorted(found) == [(q, k) for q in queries for k in keys if 0 <= q - k < width]


@pytest.mark.parametrize(("width", "sinks"), [(1, 1), (3, 2), (4, 9), (7, 40)])
def test_sink_bands_have_every_sink_behind_a_window_once(width: int, sinks: int) -> None:
    q_ranges = (TokenRange(0, 12), TokenRange(20, 34))
    k_ranges = (TokenRange(0, 1), TokenRange(2, 8), TokenRange(15, 24))
    queries, keys = ([token for part in ranges for token in range(*part)] for ranges in (q_ranges, k_ranges))
    documents = ((0, 3), (3, 3), (3, 20), (20, 34))
    layout = packed_layout([end - start for start, end in documents]).part(q_ranges, k_ranges)
    found = []
    for band in sink_bands(layout, width, sinks, tile=4):
        assert queries[band.rows] == list(range(*band.queries))
        assert keys[band.key_rows] == list(range(*band.keys))
        pairs = [(q, k) for q in range(*band.queries) for k in range(*band.keys)]
        behind = [(q, k) for q, k in pairs if q - k >= width]
        found += behind
    assert sorted(found) == [
        (q, k)
        for start, end in documents
        for q in queries
        for k in keys
        if start <= q < end and start <= k < start + sinks and q - k >= width
    ]


def results(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    width: int,
    engine: Engine = LOCAL_ENGINE,
    backend: str = "auto",
    sinks: int = 0,
) -> list[torch.Tensor]:
    """[out, dq, dk, dv]."""
    leaves = triple(x.detach().requires_grad_() for x in (q, k, v))
    out, _ = engine(*leaves, WindowAttention(width, q.shape[-1], backend, sinks), layout)
    weights = torch.arange(out.numel(), device=q.device).view_as(out).cos().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, width: int, sinks: int = 0
) -> list[torch.Tensor]:
    token, document = layout.q_tokens, layout.q_documents
    back = token[:, None] - token[None]
    near = (back < width) | (layout.positions(token, document) < sinks)
    seen = ((document[:, None] == document[None]) & (back >= 0) & near).unsqueeze(0)
    scale = q.shape[-1] ** -0.5
    out, lse = masked_attend(q, k, v, lambda rows, keys: seen[:, rows, keys], scale, prefix=True)
    dout = torch.arange(out.numel(), device=q.device).view_as(out).cos().to(out.dtype)
    state = BackwardState(dout, q, k, v, out, lse)
    return [out, *masked_attend_backward(state, lambda rows, keys: seen[:, rows, keys], scale, prefix=True)]


@pytest.mark.parametrize("sinks", [0, 1, 7, 30])
@pytest.mark.parametrize("width", [1, 5, 16, 100])
def test_windows_equal_a_mask_over_all_keys(width: int, sinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_LEAST_TILE", 8)
    monkeypatch.setattr(window, "_ROWS_AT_ONCE", 1)
    q, k, v = (x.detach() for x in make_qkv(60, 4, 2, 8, "cpu"))
    layout = packed_layout([33, 0, 1, 26])
    got = results(q, k, v, layout, width, sinks=sinks)
    torch.testing.assert_close(got, masked(q, k, v, layout, width, sinks), rtol=0, atol=1e-13)


class MaskedKernel:
    """A varlen kernel with windows on any device, by a mask inside each segment."""

    most_segments = 8

    @staticmethod
    def refuses(q: torch.Tensor) -> str:
        return ""

    @staticmethod
    def mask(segments: Segments, queries: int, keys: int) -> Callable[[slice, slice], torch.Tensor]:
        row, key = torch.arange(queries), torch.arange(keys)
        q_segment = torch.searchsorted(segments.cu_q[1:].long(), row, right=True)
        k_segment = torch.searchsorted(segments.cu_k[1:].long(), key, right=True)
        seen = q_segment[:, None] == k_segment[None]
        assert segments.window is not None
        last = segments.cu_k[1:][q_segment] - segments.cu_q[1:][q_segment] + row
        back = last[:, None] - key[None]
        seen = seen & (back >= 0) & (back < segments.window)
        return lambda rows, columns: seen[None, rows, columns]

    @classmethod
    def forward(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return masked_attend(q, k, v, cls.mask(segments, len(q), len(k)), scale, prefix=False)

    @classmethod
    def backward(
        cls, state: BackwardState, segments: Segments, scale: float, deterministic: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mask = cls.mask(segments, len(state.q), len(state.k))
        return masked_attend_backward(state, mask, scale, prefix=False)


@pytest.mark.parametrize("sinks", [0, 1, 7])
@pytest.mark.parametrize("width", [1, 5, 16, 100])
def test_kernels_are_given_the_documents_and_keys_of_every_band(
    width: int, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "TorchFlash", MaskedKernel)
    q, k, v = (x.detach() for x in make_qkv(60, 4, 2, 8, "cpu"))
    layout = packed_layout([33, 0, 1, 26])
    attention = WindowAttention(width, 8, sinks=sinks)
    assert attention._kernel(q, layout) is MaskedKernel
    want = masked(q, k, v, layout, width, sinks)
    torch.testing.assert_close(results(q, k, v, layout, width, sinks=sinks), want, rtol=0, atol=1e-13)
    for strategy in ((TokenRange(3, 20), TokenRange(31, 50)), (TokenRange(30, 60),)):
        part = layout.part(strategy, None)
        rows = part.q_tokens
        out, lse = attention.attend(q[rows], k, v, part, ())
        torch.testing.assert_close(out, want[0][rows], rtol=0, atol=1e-13)
        state = BackwardState(q[rows], q[rows], k, v, out, lse)
        plain = WindowAttention(width, 8, "reference", sinks)
        got = attention.attend_backward(state, part, ())
        torch.testing.assert_close(got, plain.attend_backward(state, part, ()), rtol=0, atol=1e-13)


LENGTHS = [12, 0, 1, 61]
CASES = [{"window": 5}, {"window": 5, "sinks": 3}, {"window": 2, "sinks": 9}]
each = pytest.mark.parametrize("options", CASES, ids=str)


@each
@pytest.mark.parametrize("lengths", [[], [0], [1], [61, 12, 0, 1], [5, 8, 130]])
def test_attended_pairs_are_those_of_the_masks(options: dict[str, int], lengths: list[int]) -> None:
    layout = packed_layout(lengths)
    token, document = layout.q_tokens, layout.q_documents
    back = token[:, None] - token[None]
    near = (back < options["window"]) | (layout.positions(token, document) < options.get("sinks", 0))
    seen = (document[:, None] == document[None]) & (back >= 0) & near
    kind = WindowKind(WindowKind.Options(**options), 8)
    assert kind.pairs(MODEL, lengths) == seen.sum().item() - sum(lengths) / 2


def test_a_window_of_everything_is_full_attention() -> None:
    full = WindowKind(WindowKind.Options(window=100, sinks=3), 8)
    assert full.pairs(MODEL, [61, 100]) == (61**2 + 100**2) / 2


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [0, 64])
@pytest.mark.parametrize("width", [1, 64, 300, 5000])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("spans", [True, False])
def test_the_kernel_equals_a_mask(
    width: int, head_dim: int, spans: bool, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16, whole sequences and the ranges of a zigzag shard."""
    q, k, v = (x.detach() for x in make_qkv(2000, 4, 2, head_dim, "cuda", torch.bfloat16))
    layout = packed_layout([1300, 0, 1, 699], "cuda")
    attention = WindowAttention(width, head_dim, sinks=sinks)
    assert attention._kernel(q, layout) is not None
    assert attention.takes_spans(q, layout)
    if not spans:
        monkeypatch.setattr(WindowAttention, "takes_spans", lambda *_: False)
    want = masked(q.double(), k.double(), v.double(), layout, width, sinks)
    for got, exact in zip(results(q, k, v, layout, width, sinks=sinks), want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0.03)
    part = layout.part((TokenRange(100, 400), TokenRange(1200, 1500)), None)
    rows = part.q_tokens
    out, lse = attention.attend(q[rows], k, v, part, ())
    torch.testing.assert_close(out.double(), want[0][rows], rtol=0.02, atol=0.03)
    dq, _, _ = attention.attend_backward(BackwardState(out, q[rows], k, v, out, lse), part, ())
    plain = WindowAttention(width, head_dim, "reference", sinks)
    state = BackwardState(*(x.double() for x in (out, q[rows], k, v, out, lse)))
    torch.testing.assert_close(dq.double(), plain.attend_backward(state, part, ())[0], rtol=0.02, atol=0.03)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("reach", [1, 5, 20, 200])
def test_a_rank_is_sent_the_keys_that_its_queries_reach_and_no_others(layout: CPLayout, reach: int) -> None:
    """Where a window is shorter than a part of the sequence, they are window - 1 for each, however long it is."""
    sequence = SequenceLayout.split(96, 4, layout)
    found = [edges(sequence, rank, reach, torch.device("cpu")) for rank in range(4)]
    for rank, edge in enumerate(found):
        own = {token for part in sequence.ranges[rank] for token in range(*part)}
        wanted = {key for token in own for key in range(max(0, token - reach + 1), token + 1)}
        assert wanted == {token for part in edge.keys for token in range(*part)}
        assert len(edge.order_S) == len(wanted)
        assert sum(edge.received_rows) == len(wanted - own)
        assert edge.sent_rows == [other.received_rows[rank] for other in found]
    planned = WindowExchange(reach).received_tokens(CPStrategy(4, "allgather", layout, 4), 96)
    assert max(sum(edge.received_rows) for edge in found) == planned


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s.transport != "ulysses"], ids=str)
def test_a_window_travels_by_its_edges_where_it_can(strategy: CPStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ulysses brings all keys for some heads; a window with first tokens needs keys from everywhere."""

    def never(*_arguments: object) -> None:
        raise AssertionError("all keys travel")

    for transport in (AllGather, Ring):
        monkeypatch.setattr(transport, "forward", never)
        monkeypatch.setattr(transport, "backward", never)
    layer = make_layer("window", {"window": 7}, [20, 0, 1, 43])
    assert_ranks_equal_one_device(layer, strategy)
    with pytest.raises(AssertionError, match="all keys travel"):
        assert_ranks_equal_one_device(make_layer("window", {"window": 7, "sinks": 1}, [20, 44]), strategy)


@pytest.fixture
def with_a_learned_sink() -> Iterator[str]:
    with KINDS.registered("window with sink", with_sink(WindowKind)):
        yield "window with sink"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_learned_sink_joins_a_window_on_ranks(strategy: CPStrategy, with_a_learned_sink: str) -> None:
    assert_ranks_equal_one_device(make_layer(with_a_learned_sink, {"window": 7}, [20, 0, 1, 43]), strategy)


@pytest.mark.gpu
def test_kernels_are_as_exact_with_a_learned_sink(with_a_learned_sink: str) -> None:
    ours, plain = ({"window": 100, "backend": backend} for backend in ("auto", "reference"))
    assert_near_float64(with_a_learned_sink, ours, plain, torch.device("cuda"))


@pytest.mark.parametrize("transport", ["allgather", "ring", "ulysses"])
def test_a_plan_counts_the_edges_alone(transport: str) -> None:
    """Of a window, whatever the length of the sequence; of the other layers all keys."""
    attention = {"default": "window", "window": {"window": 512}, "overrides": {1: {"kind": "full"}}}
    strategy = CPStrategy(2, transport, "contiguous", 2)
    received = []
    model, short = stage_of(attention, cp=2)
    for stage in (short, replace(short, seq_len=2 * short.seq_len)):
        window, full = (stage_costs(model, stage, strategy)[layer].node_bytes for layer in stage.attention[:2])
        received.append(window)
        assert window < full / 4 or transport == "ulysses"
    assert (received[0] == received[1]) == (transport != "ulysses")
