"""The kind `full`: dense causal attention."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.facets import Decodes, decode_as_trained
from moba_train.attention.full import calls
from moba_train.attention.full.kernels import BACKENDS
from moba_train.attention.kernels.block_attention import BlockAttention, HeadsSelection
from moba_train.attention.kernels.common.cached_keys import CachedKeys
from moba_train.attention.kernels.common.geometry import history_blocks, history_bound
from moba_train.attention.kernels.table import call_problem, kernel_decodes
from moba_train.attention.kernels.varlen import TorchFlash, VarlenKernel
from moba_train.attention.kind import AttentionKind, KindFacts, MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection, head_parts
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig

_BLOCK = 4096
"""Tokens of a block where attention to all blocks stands in for a kernel of full attention."""
_ENTRIES = 2**25
"""Blocks of all query heads that are listed at once: 128 MiB of ids, and as much of lists."""
_BLOCKS_PAY_FROM = 8192
"""Tokens of one document from which blocks are faster than FlashAttention-2 in a fixed order: forward and backward 5.5
for 9.4 ms at 8K, 68 for 142 at 32K (benchmarks/results/determinism-blocks-h200.json)."""


class FullAttention(LocalAttention, Decodes):
    """Every query attends to all earlier tokens of its document and to itself."""

    class Options(Section):
        """Options of `kind: full`."""

        backend: Literal["auto", "flash4", "cudnn", "flash", "flash2", "sdpa", "reference"] = Field(
            "auto",
            description="flash4: the package flash-attn-4; cudnn: CUDA, one document or equally long ones; flash: "
            "CUDA, any documents; flash2: the same by the package flash-attn; sdpa: fused CPU kernel; reference: plain "
            "PyTorch; auto: the fastest that can do it",
        )

    def __init__(self, options: Options, head_dim: int, softmax_scale: float | None = None) -> None:
        self.options = options
        self.scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.by_block = BlockAttention(_BLOCK, self.scale, "auto", "attention.full.backend")

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the given keys that causality allows."""
        if self.fixed_order_by_blocks(q_THD, layout):
            parts = self._every_block(q_THD, k_SKD, layout)
            return self.by_block.attend_in_parts(q_THD, k_SKD, v_SKD, layout, parts)
        return calls.attend(self.pick(q_THD, layout), q_THD, k_SKD, v_SKD, layout, self.scale)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        if self.fixed_order_by_blocks(state.q, layout):
            return self.by_block.attend_backward_in_parts(state, layout, self._every_block(state.q, state.k, layout))
        return calls.attend_backward(self.pick(state.q, layout), state, layout, self.scale)

    def fixed_order_by_blocks(self, q_THD: Tensor, layout: Layout) -> bool:
        """True if the call goes to the kernels of block attention, with every block selected.

        They always add in a fixed order, which makes FlashAttention-2 slower: under torch's deterministic algorithms
        they replace it where they were measured to be faster, on one whole document.
        """
        if self.options.backend != "auto" or not torch.are_deterministic_algorithms_enabled():
            return False
        one = layout.is_whole and layout.cu_seqlens.numel() == 2 and layout.total >= _BLOCKS_PAY_FROM
        if not one or call_problem(q_THD, layout, _BLOCK, history_bound(layout, _BLOCK)):
            return False
        return self.pick(q_THD, layout) is TorchFlash

    def _every_block(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Iterator[HeadsSelection]:
        """The selection of every block, for as many heads at a time as `_ENTRIES` allows."""
        tokens, heads, _ = q_THD.shape
        kv_heads = k_SKD.shape[1]
        selected_TC = history_blocks(layout, self.by_block.block_size)
        together = _ENTRIES * kv_heads // max(1, tokens * heads * selected_TC.shape[1])
        for of, kv in head_parts(heads, kv_heads, together):
            # Every head has the same list, but the kernels read one for each.
            selected_HTC = selected_TC.repeat(of.stop - of.start, 1, 1)
            selection = self.by_block.selection(selected_HTC, q_THD[:, of], layout, kv_heads=kv.stop - kv.start)
            yield HeadsSelection(of, kv, selection)

    def decode(self, q_BHD: Tensor, cached: CachedKeys) -> tuple[Tensor, Tensor]:
        """(out [B, H, D], lse [H, B]) of the newest token of each sequence; with a kernel of its own on CUDA."""
        if self.options.backend != "auto" or not kernel_decodes(q_BHD):
            return decode_as_trained(self, q_BHD, cached)
        from moba_train.attention.kernels.triton.decode import decode

        return decode(q_BHD, cached, scale=self.scale)

    def pick(self, q_THD: Tensor, layout: Layout) -> type[VarlenKernel]:
        """The backend for this call. Raises ValueError when the options demand one that cannot do it."""
        able = [name for name, backend in BACKENDS.items() if backend.takes(q_THD, layout)]
        wanted = self.options.backend
        if wanted == "auto":
            return next(BACKENDS[name] for name in able if BACKENDS[name].pays(layout))
        if wanted not in able:
            raise ValueError(
                f"attention.full.backend: {wanted!r} cannot run head dim {q_THD.shape[-1]}, {q_THD.dtype} on "
                f"{q_THD.device.type}, {'all' if layout.is_whole else 'a part'} of the sequence; usable here: auto, "
                f"{', '.join(able)}"
            )
        return BACKENDS[wanted]


_DEVICES = {"flash4": "cuda", "cudnn": "cuda", "flash": "cuda", "flash2": "cuda", "sdpa": "cpu"}
"""The device that a backend needs."""


class FullKind(AttentionKind):
    """Every query attends to all earlier tokens of its document and to itself."""

    name = "full"
    Options = FullAttention.Options
    facts = KindFacts(takes_sink=True)

    def __init__(self, options: FullAttention.Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.attentions = (FullAttention(options, head_dim),)

    @classmethod
    def problems(cls, options: FullAttention.Options, context: StageContext) -> Iterator[str]:
        """A backend that is not reproducible in a deterministic run, or not for the run's device."""
        if context.deterministic and options.backend == "cudnn":
            yield (
                f"backend: given 'cudnn' {context.layers}, whose backward pass is not reproducible, with "
                "deterministic: true; set auto or flash"
            )
        needs = _DEVICES.get(options.backend)
        if needs and context.device not in (None, needs):
            yield (
                f"backend: given {options.backend!r} {context.layers}, which runs on {needs} only; the run trains on "
                f"{context.device}; set auto"
            )

    @classmethod
    def full_attention(cls, options: FullAttention.Options, keep_windows: bool = False) -> LayerAttention:
        """Itself."""
        return LayerAttention(cls.name, options)

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Half of each document's square."""
        return full_pairs(lengths)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Flash kernels sum the gradients of queries in float32."""
        return TokenBytes(workspace=4 * model.heads * model.head_width)


class KindAround(AttentionKind):
    """Base class of kinds that compare another one with full attention, and have its name, facts and costs."""

    def __init__(self, own: AttentionKind) -> None:
        super().__init__(own.options, own.head_dim)
        self.name = own.name  # type: ignore[misc]  # by which the layer finds the parameters of its kind
        self.facts = own.facts
        self.attentions = own.attentions
        self.own = own

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Pairs of the own kind."""
        return self.own.pairs(model, lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Operations of the own kind."""
        return self.own.flops(model, lengths)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Memory of the own kind."""
        return self.own.token_bytes(model, batch)


def full_pairs(lengths: Sequence[int]) -> float:
    """Pairs of a query and a key of dense causal attention in documents of these lengths: half of each one's square."""
    return sum(length**2 for length in lengths) / 2
