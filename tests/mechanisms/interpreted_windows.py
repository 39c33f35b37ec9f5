"""Windows as spans of neighbouring keys, with and without sinks, in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moba_train.attention.kind import MicroBatch
from moba_train.attention.protocol import BackwardState
from moba_train.mechanisms import window_sinks
from moba_train.mechanisms.window import WindowAttention, WindowKind
from moba_train.tools.plan.rates import MEASURED_MODEL
from moba_train.torch_private import TorchDispatchMode
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


class LivingBytes(TorchDispatchMode):
    """Counts, inside, the bytes of living tensors that were made here."""

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        """The most so far."""

    def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), further: Any = None) -> Any:
        result = function(*arguments, **(further or {}))
        if isinstance(result, Tensor) and "empty" in str(function):
            storage = result.untyped_storage()
            self._living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._living = {key: found for key, found in self._living.items() if not found[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._living.values()))
        return result


def test_gradients_of_a_window_take_what_is_counted() -> None:
    """Besides results and stats: float32 sums for keys and values, and nothing for lists of blocks."""
    heads, kv_heads, width, tokens = 4, 2, 64, 512
    q, k, v, dout = inputs([tokens], heads, kv_heads, width, torch.float32, "cpu")
    layout, attention = layout_of([tokens], "cpu"), WindowAttention(100, width)
    out, lse = attention.attend(q, k, v, layout, ())
    state = BackwardState(dout, q, k, v, out, lse)
    attention.attend_backward(state, layout, ())  # makes the tables of the layout
    with LivingBytes() as living:
        results = attention.attend_backward(state, layout, ())
    model = MEASURED_MODEL.model_copy(update={"heads": heads, "kv_heads": kv_heads, "head_dim": width})
    counted = WindowKind(WindowKind.Options(), width).token_bytes(model, MicroBatch(4, tokens, tokens, 1)).workspace
    stats = 8 * heads
    taken = living.most - sum(x.nbytes for x in results)
    assert taken == pytest.approx(tokens * (counted + stats), rel=0.02)
