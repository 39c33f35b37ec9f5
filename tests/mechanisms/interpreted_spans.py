"""Attention to spans of neighbouring keys, alone and beside selected blocks, in Triton's interpreter."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moba_train.attention.kernels.common import call
from moba_train.attention.layout import Layout
from moba_train.mechanisms.infllm_v2.infllm_v2_kind import InfLLMV2Attention
from moba_train.mechanisms.moa.moa_kind import SpanAttention
from moba_train.mechanisms.moba_window import MobaWindowAttention
from tests.attention.helpers import ranges
from tests.attention.kernel_checks import assert_results, exact, inputs, layout_of, run, run_in_parts
from tests.attention.quick_interpreter import quicken

quicken()


def test_spans_of_heads_with_blocks_of_several_sizes() -> None:
    """The kind `moa`: heads that share keys, with blocks of 64 and 256 tokens, and one with full attention."""
    options = {"alpha": (64, -200, 0), "beta": (0.0, 0.6, 1.0), "max_length": 6000}
    tensors, layout = inputs([300, 20], 3, 1, 64, torch.float32, "cpu"), layout_of([300, 20], "cpu")
    ours, reference = (
        SpanAttention(SpanAttention.Options(backend=backend, **options), 64) for backend in ("triton", "reference")
    )
    assert [rule.block_size for rule in ours.rules] == [64, 256, 0]
    got, want = (run(attention, tensors, layout)[0] for attention in (ours, reference))
    assert_results(got, want)


def infllm_v2(lengths: list[int], heads: int, **options: Any) -> tuple[InfLLMV2Attention, list[torch.Tensor], Layout]:
    """An attention of local and selected blocks, its inputs and their layout; one key/value head."""
    sizes = {"block_size": 64, "topk": 3, "local_blocks": 2, "window": 32, "stride": 16}
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(**sizes | options, backend="triton"), 64)
    return attention, inputs(lengths, heads, 1, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")


def assert_selected_and_local(
    attention: InfLLMV2Attention,
    tensors: Sequence[torch.Tensor],
    layout: Layout,
    found: Sequence[torch.Tensor],
    selection: Any,
) -> None:
    """The results are those of one mask over all blocks, of which more than the selected ones are local."""
    selected = attention.blocks.selected_blocks(selection)
    assert (selected >= 0).sum() > len(selected) * (selection[0] >= 0).sum() > 0
    want = exact(tensors, layout, selected, attention.block_size, attention.scale)
    assert_results(found, want)


def test_local_and_selected_blocks_share_one_softmax_from_shard_to_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short blocks, whose lists are cut into work ranges."""
    attention, tensors, layout = infllm_v2([210, 0, 1, 20], 2, dense_len=1)
    monkeypatch.setattr(call.BlockCall, "limit", 100)
    found, _ = run_in_parts(attention, tensors, layout, [ranges((0, 37), (150, 231)), ranges((37, 150))])
    selection = attention.select(tensors[0], attention.summarize(tensors[1], layout), layout)
    assert_selected_and_local(attention, tensors, layout, found, selection)


def test_local_and_selected_blocks_may_be_long() -> None:
    attention, tensors, layout = infllm_v2([480, 10], 1, dense_len=200, block_size=192, local_blocks=1)
    assert_selected_and_local(attention, tensors, layout, *run(attention, tensors, layout))


def moba_window(backend: str, **options: Any) -> MobaWindowAttention:
    """MoBA with a window, for heads of 64."""
    return MobaWindowAttention(MobaWindowAttention.Options(backend=backend, **options), 64, section="")


@pytest.mark.parametrize("block_size", [64, 192])
def test_every_head_selects_blocks_before_a_window(block_size: int) -> None:
    lengths = [3 * block_size, 0, 1, 70]
    tensors, layout = inputs(lengths, 2, 1, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    attention = moba_window("triton", block_size=block_size, topk=2, window=block_size)
    last = layout.total - 50
    found, _ = run_in_parts(attention, tensors, layout, [ranges((0, 37), (last, layout.total)), ranges((37, last))])
    whole, selection = run(attention, tensors, layout)
    assert_results(found, whole)
    selected = attention.select_blocks(tensors[0], attention.summarize(tensors[1], layout), layout)
    assert (selected >= 0).sum() > (selection[0] >= 0).sum() > 0
    assert_results(whole, exact(tensors, layout, selected, block_size, attention.scale))


@pytest.mark.parametrize("topk", [3, 19])
@pytest.mark.parametrize("window", [64, 512, 3200])
def test_the_candidates_end_before_the_window(topk: int, window: int) -> None:
    """Both kernels that select, also for queries whose window begins before their document."""
    options: dict[str, Any] = {"block_size": 64, "topk": topk, "window": window, "always": ("current", "first")}
    lengths = [1500, 0, 3, 100]
    tensors, layout = inputs(lengths, 2, 1, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours, plain = (moba_window(backend, **options) for backend in ("triton", "reference"))
    summaries = plain.summarize(tensors[1], layout)
    assert torch.equal(*(one.select_blocks(tensors[0], summaries, layout) for one in (ours, plain)))
