"""Windows as spans of neighbouring keys, with and without sinks, in Triton's interpreter."""

import pytest
import torch

from moba_train.mechanisms import window_sinks
from moba_train.mechanisms.window import WindowAttention
from tests.attention.helpers import ranges
from tests.attention.kernel_checks import inputs, layout_of, run
from tests.attention.quick_interpreter import quicken

quicken()


@pytest.mark.parametrize(("width", "sinks"), [(1, 0), (100, 0), (70, 3), (20, 5), (9, 150), (1000, 3)])
def test_windows_are_spans(width: int, sinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_sinks, "QUERIES_OF_SINKS", 32)
    lengths = [210, 0, 1, 60]
    tensors, layout = inputs(lengths, 2, 1, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours, plain = (WindowAttention(width, 64, backend, sinks) for backend in ("auto", "reference"))
    keys = ranges((0, 60), (190, 271))
    for part in (layout, layout.part(ranges((0, 37), (180, 271)), None), layout.part(ranges((30, 240)), keys)):
        q, k, v, dout = tensors
        some = [q[part.q_tokens], k[part.k_tokens], v[part.k_tokens], dout[part.q_tokens]]
        assert ours.takes_spans(some[0], part)
        got, want = (run(attention, some, part, ((),))[0] for attention in (ours, plain))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
