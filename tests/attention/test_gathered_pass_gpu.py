"""All gradients in one pass over gathered rows, on a Hopper GPU: the checks of test_triton_gpu.py by that path."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from tests.noting import noting

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gathered_rows")]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moba_train.attention.kernels import table  # noqa: E402
from tests.attention import test_triton_gpu as checks  # noqa: E402

SIZES = (128,)


@pytest.fixture
def gathered_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that does not launch the kernel fails."""
    if torch.cuda.get_device_capability() != (9, 0) or not triton.__version__.startswith("3.6."):
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    from moba_train.attention.kernels.hopper.blocks_128_gradients import GatheredPass  # needs Gluon

    launched = []
    plain = GatheredPass.gathered
    rows = [row._replace(head_widths=(64, 128)) if "blocks_128" in row.file else row for row in table.KERNELS]
    monkeypatch.setattr(table, "KERNELS", tuple(rows))
    monkeypatch.setattr(GatheredPass, "gathered", noting(lambda *_: launched.append(True), plain))
    yield
    assert launched


CASES = [
    one
    for one in checks.CASES
    for lengths, *_, options in [cast(tuple[Any, ...], one.values)]
    if sum(lengths) and options["block_size"] in SIZES and options["topk"] > 1
]
"""Those that select blocks of these sizes."""


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "dtype", "options"), CASES)
def test_gradients_are_as_exact_as_attention_written_plainly(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    checks.test_outputs_and_gradients_for_the_kernels_own_selection(lengths, heads, kv_heads, head_dim, dtype, options)


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "dtype", "options"), CASES[:1])
def test_later_layers_repeat_the_launches(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    checks.test_later_layers_on_a_layout_give_the_bits_of_a_first_one(
        lengths, heads, kv_heads, head_dim, dtype, options
    )


@pytest.mark.parametrize("cut", [1500, 77])
def test_shards_of_queries(cut: int) -> None:
    checks.test_shards_of_queries_that_meet_all_keys_have_the_gradients_of_the_whole(cut, *SIZES)


@pytest.mark.parametrize("topk", [2, 8])
def test_bits_repeat_beside_another_process(topk: int) -> None:
    checks.test_results_repeat_bit_by_bit_beside_another_process(128, topk)
