"""The path from `Attention.forward` to the kernels, traced in real calls: docs/explanation/attention-path.md.

    python -m tests.attention.path   # writes the page again

Needs no GPU: a stand-in launches the kernels, and Python does all that it does before.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from moba_train.attention.engine import LOCAL_ENGINE, OperatorEngine
from moba_train.attention.layout import packed_layout
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.config.model import ModelConfig
from moba_train.model.block import Attention
from moba_train.model.rope import rope_cos_sin
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.launches import kernels_not_run
from tests.thread_ranks import thread_transports

PACKAGE = Path(__file__).parents[2] / "moba_train"
PAGE = PACKAGE.parent / "docs" / "explanation" / "attention-path.md"
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
        self.stops: dict[Stop, int] = {}
        """Depth below `Attention.forward`, at the first visit."""
        self.lines: dict[Stop, int] = {}
        self.kernels: dict[Stop, list[str]] = {}
        """Names of the kernels that a function launches."""
        self.depth = 0
        """Functions on the stack at once, at most."""

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
        stack = [*_callers(frame)][::-1]
        self.depth = max(self.depth, len(stack))
        for depth, code in enumerate(stack):
            if stop := _stop(code):
                self.stops.setdefault(stop, depth)
                self.lines[stop] = code.co_firstlineno
        if launches and (above := _stop(stack[-2])):
            names = self.kernels.setdefault(above, [])
            if (name := frame.f_locals["kernel"].__name__) not in names:
                names.append(name)


def _stop(code: CodeType) -> Stop | None:
    """The function of this code; None if it is not the package's."""
    path = Path(code.co_filename)
    return Stop(str(path.relative_to(PACKAGE)), code.co_qualname) if path.is_relative_to(PACKAGE) else None


def _callers(frame: FrameType | None) -> Iterator[CodeType]:
    """The package's functions on the stack, up to `Attention.forward`."""
    while frame is not None:
        if stop := _stop(frame.f_code):
            yield frame.f_code
            if stop.function == "Attention.forward":
                return
        frame = frame.f_back


@torch.no_grad()
def traced(backend: str, engine: OperatorEngine = LOCAL_ENGINE, layers: int = 1) -> Trace:
    """A forward pass of MoBA's attention with that backend, in the last of the step's first `layers` layers."""
    attention = Attention(MODEL, 0, {}).bfloat16()
    attention.kind = MobaKind(MobaKind.Options(block_size=512, topk=3, backend=backend), MODEL.head_width)
    attention.engine = engine
    layout = packed_layout([TOKENS])
    tokens = engine.shard(layout).layout.queries
    cos, sin = rope_cos_sin(torch.arange(tokens), attention.rope, MODEL.head_width)
    x_TD = torch.zeros(tokens, MODEL.hidden_size, dtype=torch.bfloat16)
    for _ in range(layers):
        with Trace() as trace:
            attention(x_TD, cos, sin, layout)
    return trace


def on_one_device(backend: str = "triton", layers: int = 1) -> Trace:
    """The trace of one device."""
    with kernels_not_run():
        return traced(backend, layers=layers)


def on_a_rank() -> Trace:
    """The trace of one of two ranks that share the sequence by all-gather."""
    strategy = CPStrategy(2, "allgather", "contiguous", 2)
    engines = [ContextParallel(strategy, transport) for transport in thread_transports(strategy)[0]]
    with kernels_not_run(), ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(lambda engine: traced("triton", engine), engines)
    return first


def drawn(trace: Trace) -> str:
    """The path as text: functions below the one that calls them, with the lines where they begin."""
    rows = []
    for stop, depth in trace.stops.items():
        name = "  " * depth + stop.function.replace(".<locals>", "")
        launched = f"   launches {', '.join(trace.kernels[stop])}" if stop in trace.kernels else ""
        rows.append(f"{name:<48} {stop.file}:{trace.lines[stop]}{launched}")
    files = len({stop.file for stop in trace.stops})
    counted = f"{len(rows)} functions in {files} files, at most {trace.depth} on the stack at once."
    return "\n".join([counted, "", "```text", *rows, "```"])


def page() -> str:
    """docs/explanation/attention-path.md."""
    return f"""# From the attention layer to the kernels

The functions of this package on the stack whenever MoBA's forward pass launches a kernel, in the order of their first
visit, each below the one that called it. Traced in real calls; `python -m tests.attention.path` writes this page, and
`tests/attention/test_contract.py` keeps it true. [architecture.md](architecture.md) tells the way in words.

Torch's operators cut the path in two places, so that torch.compile and activation checkpointing can keep attention
whole: `_Attention.forward` is called by autograd, and `_attend` finds the engine and the attention by their handles
([operators.py](../../moba_train/attention/operators.py), [handles.py](../../moba_train/attention/handles.py)).

## One device, Triton kernels

The first layer of a step, in blocks of 512 tokens, topk 3. Later layers find the tables that follow from the layout
alone, and repeat recorded launches.

{drawn(on_one_device())}

## One device, plain PyTorch

The same layer with `backend: reference`, up to the functions that compute.

{drawn(on_one_device("reference"))}

## Context parallelism

One of two ranks that share the sequence by all-gather. `_attend` hands over to the engine, which runs the same
functions of the attention around its transfers.

{drawn(on_a_rank())}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
