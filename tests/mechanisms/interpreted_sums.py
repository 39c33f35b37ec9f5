"""The sums of `moba_v1` over blocks, composed from varlen kernels, in Triton's interpreter."""

import pytest
import torch

from moba_train.attention.kernels import composed
from tests.attention.helpers import ranges
from tests.attention.kernel_checks import assert_results, inputs, layout_of, run, run_in_parts
from tests.attention.quick_interpreter import quicken
from tests.mechanisms.test_moba_v1 import build_summed

quicken()


@pytest.mark.parametrize("merge", ["sum", "gate"])
@pytest.mark.parametrize(("lengths", "limit", "kv_heads"), [([150, 70], None, 2), ([130, 0, 1, 90], 300, 1)])
def test_the_composition_adds_up_blocks_with_kernels(
    merge: str, lengths: list[int], limit: int | None, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit:
        monkeypatch.setattr(composed, "slots_at_once", lambda rows, head_dim: limit)
    tensors, layout = inputs(lengths, 4, kv_heads, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours, plain = (build_summed(kind, 64, merge, block_size=50, topk=3) for kind in ("composed", "reference"))
    whole, selection = run(ours, tensors, layout)
    weighted = merge == "gate"
    assert len(selection) == 3 + weighted, "no lists from the kernels"
    sharded, _ = run_in_parts(
        ours, tensors, layout, [ranges((0, 37), (180, sum(lengths))), ranges((37, 180))], all_keys=True
    )
    want, _ = run(plain, [x.double() for x in tensors], layout, selection[: 1 + weighted])
    for got in (whole, sharded):
        assert_results(got, want)
