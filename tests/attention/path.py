"""The path from `Attention.forward` to the kernels, traced in real calls.

Needs no GPU: a stand-in launches the kernels, and Python does all that it does before.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.layout import packed_layout
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.config.model import ModelConfig
from moba_train.model.block import Attention
from moba_train.model.rope import rope_cos_sin
from tests.attention.launches import kernels_not_run

PACKAGE = Path(__file__).parents[2] / "moba_train"
LAUNCH = "attention/kernels/common/launch.py"
REFERENCE = ("attention/moba/gate.py", "attention/kernels/common/reference.py")
MODEL = ModelConfig(vocab_size=8, hidden_size=512, intermediate_size=512, layers=1, heads=4, kv_heads=2)
TOKENS = 4096


class Stop(NamedTuple):
    """A function on the path."""

    file: str
    function: str


class Trace:
    """Inside, on this thread: the functions on the stack at each launch and at each call of the reference's files."""

    def __init__(self) -> None:
        self.stops: set[Stop] = set()
        self.kernels: set[str] = set()
        """Names of the kernels that are launched."""

    def __enter__(self) -> "Trace":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (here := _stop(frame.f_code)) is None or frame.f_back is None:
            return
        outside = _stop(frame.f_back.f_code)
        launches = here == Stop(LAUNCH, "launch")
        if not launches and (here.file not in REFERENCE or (outside and outside.file in REFERENCE)):
            return
        self.stops |= set(_callers(frame))
        if launches:
            self.kernels.add(frame.f_locals["kernel"].__name__)


def _stop(code: CodeType) -> Stop | None:
    """The function of this code; None if it is not the package's."""
    path = Path(code.co_filename)
    return Stop(str(path.relative_to(PACKAGE)), code.co_qualname) if path.is_relative_to(PACKAGE) else None


def _callers(frame: FrameType | None) -> Iterator[Stop]:
    """The package's functions on the stack, up to `Attention.forward`."""
    while frame is not None:
        if stop := _stop(frame.f_code):
            yield stop
            if stop.function == "Attention.forward":
                return
        frame = frame.f_back


@torch.no_grad()
def on_one_device(backend: str = "triton", layers: int = 1) -> Trace:
    """A forward pass of MoBA's attention with that backend, in the last of the step's first `layers` layers."""
    attention = Attention(MODEL, 0, {}).bfloat16()
    attention.kind = MobaKind(MobaKind.Options(block_size=512, topk=3, backend=backend), MODEL.head_width)
    attention.engine = LOCAL_ENGINE
    layout = packed_layout([TOKENS])
    cos, sin = rope_cos_sin(torch.arange(TOKENS), attention.rope, MODEL.head_width)
    x_TD = torch.zeros(TOKENS, MODEL.hidden_size, dtype=torch.bfloat16)
    with kernels_not_run():
        for _ in range(layers):
            with Trace() as trace:
                attention(x_TD, cos, sin, layout)
    return trace
