"""The rows of the attention benchmark: their notation, their inputs and the calls that are timed."""

import copy
import multiprocessing
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.attention_cost import Cost, Heads, moba_cost
from benchmarks.attention_routing import ROUTINGS, routed_inputs
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import BackwardState, Selection
from moba_train.config.base import parse_number

LONGEST_DOCUMENT = 2**15
SYNTAX = "TOKENS:BLOCK/TOPK[,heads=N][,kv=N][,d=N][,routing=" + "|".join(ROUTINGS) + "][,documents=SEED|COUNTxTOKENS]"
SYNTAX += "[,inputs=FILE]"
_OPTIONS = {"heads": "heads", "kv": "kv_heads", "d": "head_dim"}
_OPTIONS |= {name: name for name in ("routing", "documents", "inputs")}


@dataclass(frozen=True)
class Case:
    """One row: sizes, and the routing of its queries."""

    tokens: int
    block_size: int
    topk: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    routing: str = "random"
    documents: str = ""
    """Seed of random lengths from 1 to 32K (logarithmically even), or COUNTxTOKENS; empty: one document."""
    inputs: str = ""
    """File of a trained model's q, k and v (`benchmarks.flex_tiles --save`), of which the first tokens are taken."""

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read a row written as `SYNTAX` says; lengths take K and M. Raises ValueError naming what is wrong."""
        head, *options = text.split(",")
        try:
            length, setting = head.split(":")
            sizes = [parse_number(part, 1024) for part in (length, *setting.split("/", 1))]
            tokens, block_size, topk = sizes
        except ValueError as error:
            raise ValueError(f"row {text!r}: {head!r} given, {SYNTAX} needed") from error
        case = cls(tokens, block_size, topk)
        for option in options:
            key, _, value = option.partition("=")
            if key not in _OPTIONS:
                raise ValueError(f"row {text!r}: option {option!r} given, allowed: {', '.join(_OPTIONS)}")
            if key == "routing" and value not in ROUTINGS:
                raise ValueError(f"row {text!r}: routing {value!r} given, allowed: {', '.join(ROUTINGS)}")
            if key in ("heads", "kv", "d") and not value.isdecimal():
                raise ValueError(f"row {text!r}: {key} {value!r} given, a whole number needed")
            change: dict[str, Any] = {_OPTIONS[key]: int(value) if key in ("heads", "kv", "d") else value}
            case = replace(case, **change)
        if case.heads % case.kv_heads:
            raise ValueError(f"row {text!r}: {case.kv_heads} key/value heads do not divide {case.heads} heads")
        if sum(case.lengths()) != tokens:
            raise ValueError(f"row {text!r}: documents {case.documents!r} do not sum to {tokens} tokens")
        return case

    @property
    def name(self) -> str:
        """Text that `parse` reads as this case: the sizes and all that differs from a plain row. Both numbers of heads
        are given if one of them differs."""
        usual = Case(self.tokens, self.block_size, self.topk)
        said = {name for name in _OPTIONS.values() if getattr(self, name) != getattr(usual, name)}
        said |= {"heads", "kv_heads"} if said & {"heads", "kv_heads"} else set()
        options = "".join(f",{key}={getattr(self, name)}" for key, name in _OPTIONS.items() if name in said)
        return f"{short(self.tokens)}:{self.block_size}/{self.topk}{options}"

    @property
    def is_plain(self) -> bool:
        """Whether it has no options."""
        return self == Case(self.tokens, self.block_size, self.topk)

    def lengths(self) -> list[int]:
        """Document lengths in tokens."""
        if not self.documents:
            return [self.tokens]
        count, times, length = self.documents.partition("x")
        try:
            if times:
                return [parse_number(length, 1024)] * int(count)
            source = random.Random(int(self.documents))
        except ValueError as error:
            raise ValueError(f"documents={self.documents} given, a seed or COUNTxTOKENS needed") from error
        lengths: list[int] = []
        while (left := self.tokens - sum(lengths)) > 0:
            lengths.append(min(int(LONGEST_DOCUMENT ** source.random()), left))
        return lengths

    def cost(self) -> Cost:
        """The cost that the algorithm cannot avoid."""
        shape = Heads(self.heads, self.kv_heads, self.head_dim)
        return moba_cost(self.lengths(), self.block_size, self.topk, shape)


def trained_inputs(file: Path, like: Sequence[Tensor]) -> list[Tensor]:
    """q, k and v of a file's first tokens, as `like` in shape, dtype and device. Raises ValueError without them."""
    try:
        found = load_file(file)
        inputs = [found[name][: len(x)].to(x) for name, x in zip("qkv", like, strict=True)]
    except (OSError, KeyError, SafetensorError) as error:
        raise ValueError(f"inputs={file}: {error}; allowed: a file of q, k and v by safetensors") from error
    for name, got, x in zip("qkv", inputs, like, strict=True):
        if got.shape != x.shape:
            raise ValueError(f"inputs={file}: {name} has shape {list(got.shape)}, the row needs {list(x.shape)}")
    return inputs


def short(tokens: int) -> str:
    """131072 -> 128K, 1048576 -> 1M."""
    for power, suffix in ((2, "M"), (1, "K")):
        if tokens and tokens % 1024**power == 0:
            return f"{tokens // 1024**power}{suffix}"
    return str(tokens)


def backends() -> list[str]:
    """MoBA's implementations for a GPU."""
    known = get_args(MobaAttention.Options.model_fields["backend"].annotation)
    return [name for name in known if name not in ("auto", "reference")]


class Row:
    """Inputs of one case and the calls that are timed."""

    def __init__(self, case: Case, device: str = "cuda", backend: str = "triton") -> None:
        self.case = case
        self.device = device
        self.tokens = case.tokens
        self.block_size = case.block_size
        self.topk = case.topk
        generator = torch.Generator(device).manual_seed(0)
        sizes = (case.heads, case.kv_heads, case.head_dim)
        layout = self.layout()
        self.q, self.k = routed_inputs(case.routing, layout, sizes, case.block_size, case.topk, generator)
        self.v, self.dout = (
            torch.randn(like.shape, dtype=like.dtype, device=device, generator=generator) for like in (self.k, self.q)
        )
        if case.inputs:
            self.q, self.k, self.v = trained_inputs(Path(case.inputs), (self.q, self.k, self.v))
        self.attention = self._attention(backend)

    def _attention(self, backend: str) -> MobaAttention:
        options = MobaAttention.Options.model_validate(
            {"block_size": self.block_size, "topk": self.topk, "backend": backend}
        )
        return MobaAttention(options, self.case.head_dim)

    def picked(self) -> str:
        """Name of the backend that computes this row; under `auto`, the one that it picks."""
        return self.attention.blocks.pick(self.q, self.layout(), self.topk - 1).NAME

    def using(self, backend: str) -> "Row":
        """A row with the same inputs for another implementation of MoBA."""
        row = copy.copy(self)
        row.attention = self._attention(backend)
        return row

    def layout(self) -> Layout:
        """A new layout, with nothing derived from it yet."""
        return packed_layout(self.case.lengths(), self.device)

    def selected(self) -> Tensor:
        """int32 [H, T, C]: the earlier blocks that each query selects, -1 for none."""
        layout = self.layout()
        return self.attention.select_blocks(self.q, self.attention.summarize(self.k, layout), layout)

    def forward(self) -> tuple[Tensor, Tensor, Layout, Selection]:
        """The forward pass, from the layout's tables on: out, lse, layout, selection."""
        layout = self.layout()
        selection = self.attention.select(self.q, self.attention.summarize(self.k, layout), layout)
        return (*self.attention.attend(self.q, self.k, self.v, layout, selection), layout, selection)

    def both(self) -> tuple[Tensor, Tensor, Selection, Tensor, Tensor, Tensor]:
        """Forward and backward: out, lse, selection, dq, dk, dv."""
        out, lse, layout, selection = self.forward()
        state = BackwardState(self.dout, self.q, self.k, self.v, out, lse)
        return (out, lse, selection, *self.attention.attend_backward(state, layout, selection))


def compile_ahead(cases: Sequence[Case], call: Callable[[Row], Any] = Row.both) -> list[str]:
    """Compile the kernels that a `call` launches, of all `cases` at the same time, in processes of their own; returns
    error messages.

    One after the other it would take minutes of the GPU's time. Triton keeps the code on disk, where this process
    finds it; code depends on the sizes of heads and blocks, not on the length, so a few blocks are enough.
    """
    distinct = {
        replace(
            case, tokens=min(case.tokens, (case.topk + 1) * case.block_size), routing="random", documents="", inputs=""
        )
        for case in cases
    }
    workers = min(len(distinct), max(1, (os.cpu_count() or 1) // 2), 8)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        compile_one = partial(_compile, call)
        return [error for error in pool.map(compile_one, sorted(distinct, key=lambda case: case.name), 1) if error]


def _compile(call: Callable[[Row], Any], case: Case) -> str:
    try:
        call(Row(case))
        torch.cuda.synchronize()
    except Exception as error:  # the row itself will fail again, and say so in its place
        return f"{case.name}: {type(error).__name__} {str(error)[:200]}"
    return ""
