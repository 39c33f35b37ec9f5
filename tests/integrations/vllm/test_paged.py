"""Attention of the vLLM plugin on pages equals ours on packed sequences, however a text is cut into steps."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moba_vllm.layers import Moba, Window, decode_mode, layer_attention
from moba_vllm.paged import (
    PagedAttention,
    PooledKeys,
    _kernels,
    attend_from_many,
    attend_from_one,
    kernel_reads,
    page_problem,
    text_rows,
)
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.layout import packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import LocalAttention
from moba_train.mechanisms.window import WindowAttention

HEADS = 4
KV_HEADS = 2
KINDS = [
    pytest.param(Moba(32, 3), 16, id="blocks of two pages"),
    pytest.param(Moba(16, 4, "group", ("current", "previous", "first")), 16, id="group, always"),
    pytest.param(Moba(16, 3, always=("current", "first")), 64, id="pages of four blocks"),
    pytest.param(Moba(24, 2, "group"), 8, id="no power of two"),
    pytest.param(Moba(16, 1), 16, id="own block alone"),
    pytest.param(Window(20), 16, id="window"),
    pytest.param(Window(20, 3), 16, id="window and sinks"),
    pytest.param(None, 16, id="full"),
]


def ours(kind: Moba | Window | None, width: int) -> LocalAttention:
    """The attention of training, in plain PyTorch."""
    if isinstance(kind, Moba):
        options = {name: getattr(kind, name) for name in ("block_size", "topk", "select", "always")}
        return MobaAttention(MobaAttention.Options(**options, backend="reference"), width)
    if isinstance(kind, Window):
        return WindowAttention(kind.window, width, "reference", kind.sinks)
    return FullAttention(FullAttention.Options(backend="reference"), width)


class Layer:
    """Texts in shuffled pages, of which every step brings some new tokens."""

    def __init__(
        self,
        lengths: list[int],
        kind: Moba | Window | None,
        page_size: int,
        *,
        width: int = 8,
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.kind = kind
        self.scale = width**-0.5
        self.texts = [
            [
                torch.randn(n, heads, width, generator=generator).to(device, dtype)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            ]
            for n in lengths
        ]
        most = -(-max(lengths) // page_size)
        pages = torch.randperm(len(lengths) * most + 1, generator=generator).to(device)
        # What a page holds of an earlier text must not matter.
        self.cache = torch.full((len(pages), KV_HEADS, page_size, 2 * width), 7.0, device=device, dtype=dtype)
        self.table = pages[1:].view(len(lengths), most).int()
        self.pooled = PooledKeys(self.cache, kind.block_size) if isinstance(kind, Moba) else None
        self.done = [0] * len(lengths)

    def add(self, text: int, tokens: int) -> None:
        """Write the next tokens of a text, and pool what they complete."""
        before = self.done[text]
        after = self.done[text] = before + tokens
        page_size = self.cache.shape[2]
        _, k, v = self.texts[text]
        at = torch.arange(before, after, device=k.device)
        self.cache[self.table[text].long()[at // page_size], :, at % page_size] = torch.cat([k, v], -1)[before:after]
        if self.pooled is not None:
            blocks = torch.arange(before // self.pooled.block_size, after // self.pooled.block_size, device=k.device)
            self.pooled.update(self.cache, self.table, torch.full_like(blocks, text), blocks)

    def read(self, text: int, tokens: int) -> Tensor:
        """Attention of the next tokens of a text."""
        self.add(text, tokens)
        after = self.done[text]
        kv = text_rows(self.cache, self.table[text], after)
        pooled = self.pooled.read(self.table[text][None], after // self.pooled.block_size)[0] if self.pooled else None
        return attend_from_many(self.texts[text][0][after - tokens : after], kv, pooled, self.kind, self.scale)

    def decode(self, paged: PagedAttention | None = None) -> Tensor:
        """Attention of the next token of every text."""
        for text in range(len(self.texts)):
            self.add(text, 1)
        positions = torch.tensor(self.done, device=self.cache.device) - 1
        queries = torch.stack([q[at] for (q, _, _), at in zip(self.texts, positions.tolist(), strict=True)])
        given = positions, max(self.done), self.kind, self.pooled, self.scale, paged
        return attend_from_one(queries, self.cache, self.table, *given)

    def expected(self, text: int) -> Tensor:
        """Our attention of a complete text."""
        q, k, v = self.texts[text]
        layout = packed_layout([len(q)], q.device)
        attention = ours(self.kind, q.shape[-1])
        selection = attention.select(q, attention.summarize(k, layout), layout)
        return attention.attend(q, k, v, layout, selection)[0]


def read_pages(q_RHd: Tensor, k: Tensor, v: Tensor, table_RL: Tensor, lengths_R: Tensor, longest: int) -> Tensor:
    """Attention to pages as FlashAttention computes it, a text at a time, with the scale of the width."""
    assert lengths_R.max() <= longest
    rows = []
    for q_Hd, pages_L, length in zip(q_RHd, table_RL.long(), lengths_R.tolist(), strict=True):
        used = pages_L[: -(-length // k.shape[1])]
        read_k, read_v = (x[used].flatten(0, 1)[:length].transpose(0, 1) for x in (k, v))
        rows.append(F.scaled_dot_product_attention(q_Hd[:, None], read_k, read_v, enable_gqa=True)[:, 0])
    return torch.stack(rows)


@pytest.fixture
def equal() -> Callable[[Tensor, Tensor], None]:
    def check(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)

    return check


@pytest.mark.parametrize(("kind", "page_size"), KINDS)
def test_any_chunks_are_one_pass(
    kind: Moba | Window | None, page_size: int, equal: Callable[[Tensor, Tensor], None]
) -> None:
    """Chunks of a prefill that end anywhere in blocks and pages, taken in turns by two texts."""
    layer = Layer([201, 173], kind, page_size)
    chunks = [1, 15, 16, 50, 3, 1, 1, 64, 22]
    parts = [[layer.read(text, tokens) for text in (0, 1)] for tokens in chunks]
    parts[-1][0] = torch.cat([parts[-1][0], layer.read(0, 28)])
    for text, found in enumerate(zip(*parts, strict=True)):
        equal(torch.cat(found), layer.expected(text))


@pytest.mark.parametrize("paged", [None, read_pages], ids=["copies", "pages"])
@pytest.mark.parametrize(("kind", "page_size"), KINDS)
def test_decoding_together_is_one_pass(
    kind: Moba | Window | None,
    page_size: int,
    paged: PagedAttention | None,
    equal: Callable[[Tensor, Tensor], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts of different lengths, a token of each at a time: of copies, with fewer texts in memory at once than there
    are, and of the pages themselves."""
    monkeypatch.setattr("moba_vllm.paged._ELEMENTS", 2 * HEADS * 8 * 150 * 2)
    layer = Layer([100, 41, 150], kind, page_size)
    for text, prompt in enumerate((59, 0, 109)):
        if prompt:
            layer.read(text, prompt)
    steps = torch.stack([layer.decode(paged) for _ in range(41)])
    for text in range(3):
        equal(steps[:, text], layer.expected(text)[-41:])


def test_pooled_keys_are_those_of_training() -> None:
    """Bit by bit, in bfloat16."""
    layer = Layer([130], Moba(32, 2), 16, dtype=torch.bfloat16)
    for tokens in (33, 1, 96):
        layer.add(0, tokens)
    assert layer.pooled is not None
    expected = ours(layer.kind, 8).summarize(layer.texts[0][1], packed_layout([130]))
    assert expected is not None
    assert torch.equal(layer.pooled.read(layer.table, 4)[0], expected[:4])


def test_kernels_are_asked_for_the_same(equal: Callable[[Tensor, Tensor], None]) -> None:
    """The way to moba_train's kernels, which leads to its PyTorch code on a CPU."""
    kind = Moba(16, 3, always=("current", "first"))
    layer = Layer([150], kind, 16)
    layer.read(0, 70)
    layer.add(0, 80)
    q, k, v = layer.texts[0]
    assert layer.pooled is not None
    kernels = _kernels(kind, 8, layer.scale)
    assert kernels is not None
    equal(kernels(q[70:], k, v, layer.pooled.read(layer.table, 150 // 16)[0]), layer.expected(0)[70:])


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [True, False])
def test_kernels_and_plain_pytorch_on_a_gpu(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """moba_train's kernels where it is installed, and PyTorch alone, up to rounding in bfloat16."""
    if not kernels:
        monkeypatch.setattr("moba_vllm.paged._kernels", lambda *_: None)
    layer = Layer([3000, 2100], Moba(128, 4), 16, width=64, device="cuda", dtype=torch.bfloat16)
    for text, chunks in enumerate([(2048, 900), (1000, 1048)]):
        found = [layer.read(text, tokens) for tokens in chunks]
        expected = layer.expected(text)[: sum(chunks)].float()
        difference = (torch.cat(found).float() - expected).abs()
        assert difference.median() < 0.001 < 0.02 < expected.std()
        assert (difference > 0.02).float().mean() < 0.01  # a block that fits equally well
    decoded = layer.decode()
    for text, tokens in enumerate(layer.done):
        assert (decoded[text] - layer.expected(text)[tokens - 1]).abs().median() < 0.001


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "page_size"), [(Moba(128, 4), 64), (Moba(64, 6, "group"), 128), (None, 512)], ids=["head", "group", "full"]
)
def test_flash_attention_reads_the_pages(kind: Moba | None, page_size: int) -> None:
    """vLLM's own, up to rounding in bfloat16."""
    backend = pytest.importorskip("moba_vllm.backend")
    layer = Layer([900, 2100], kind, page_size, width=64, device="cuda", dtype=torch.bfloat16)
    for text, tokens in enumerate((831, 2047)):
        layer.read(text, tokens)
    paged = backend._flash_attention(64, layer.scale)
    assert paged is not None
    decoded = layer.decode(paged)
    for text, tokens in enumerate(layer.done):
        assert (decoded[text] - layer.expected(text)[tokens - 1]).abs().median() < 0.001


@pytest.mark.parametrize(
    ("kind", "page_size", "bits", "read"),
    [
        (Moba(4096, 8), 512, 16, True),
        (Moba(16, 8), 64, 16, True),
        (Moba(8, 8), 16, 16, False),
        (Moba(24, 8), 48, 16, False),
        (Window(20), 16, 16, True),
        (None, 16, 32, False),
    ],
)
def test_a_kernel_reads_units_of_16_tokens_in_16_bits(
    kind: Moba | Window | None, page_size: int, bits: int, read: bool
) -> None:
    cache: Any = SimpleNamespace(shape=(9, 2, page_size, 128), is_cuda=True, element_size=lambda: bits // 8)
    assert kernel_reads(cache, kind) is read
    cache.is_cuda = False
    assert not kernel_reads(cache, kind)


def test_pages_that_do_not_fit_are_named() -> None:
    assert not page_problem(512, 16)
    assert not page_problem(16, 128)
    assert "--block-size 48" in page_problem(48, 32)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "msa", "block_size": 16}, "kind 'msa'"),
        ({"kind": "moba", "block_size": 16, "topk": 2, "key_conv": 3}, "key_conv is 3"),
        ({"kind": "moba", "block_size": 16, "topk": 2, "gate": "new"}, "'gate' given"),
        ({"kind": "moba", "block_size": 16, "topk": 1, "always": ["first"]}, "topk is 1"),
        ({"kind": "full", "window": 3}, "kind 'full'"),
    ],
)
def test_what_is_not_known_is_refused(entry: dict[str, object], message: str) -> None:
    config = SimpleNamespace(moba={"layers": [{"kind": "full"}, entry]})
    assert layer_attention(config, 0) is None
    with pytest.raises(ValueError, match=message):
        layer_attention(config, 1)
    assert layer_attention(SimpleNamespace(), 1) is None
    with pytest.raises(ValueError, match="allowed: full, own"):
        decode_mode(SimpleNamespace(moba_decode="moba"))


def test_sinks_that_a_model_has_are_refused_and_others_may_be_named() -> None:
    """vLLM's Granite gives None for them, its gpt-oss the logits of heads."""
    backend = pytest.importorskip("moba_vllm.backend")
    backend.MobaImpl(4, 32, 1.0, 2, kind=Moba(16, 3), sinks=None)
    with pytest.raises(ValueError, match="sinks of heads: not supported in layers of kind moba"):
        backend.MobaImpl(4, 32, 1.0, 2, kind=Moba(16, 3), sinks=torch.zeros(4))
