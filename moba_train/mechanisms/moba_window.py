"""MoBA with a window before the own block: local attention does not depend on where in its block a query is.

A query attends, under one softmax, to its own block, to the blocks of the `window` tokens before it, and to its top-k
blocks of history, which the gate chooses among those before the window. Window and candidates follow from the query's
block alone, so no key counts twice. The Triton kernels take own block and window as one span of neighbouring keys
instead of the own block (kernels/triton/spans.py); other backends are given the window's blocks as selected ones.

Shape suffixes: T queries, n some of them, S keys, H query heads, K key/value heads, D head width, C selected blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from moba_train.attention.facets import SelectedBlocks
from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common.geometry import KeySpans
from moba_train.attention.kernels.common.selection import Choice, key_share, selection_statistics
from moba_train.attention.kind import MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import Layout
from moba_train.attention.moba.moba_kind import MobaKind, attended_pairs
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.attention.statistics import Statistics
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.dispatch.blocks_by_unit import BlocksByUnit, OffersUnits
from moba_train.mechanisms.local_blocks import LocalBlocks, with_local_blocks


@dataclass(frozen=True)
class BlocksAndWindow(BlockAttention):
    """`BlockAttention` to selected blocks and to local ones, none of which is selected."""

    local: LocalBlocks

    def attend(
        self,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        layout: Layout,
        selection: Selection,
        spans: KeySpans | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out [T, H, D] and lse [H, T] over the own, the local and the selected blocks, as far as their keys are
        given."""
        selection, spans = self._with_window(selection, q_THD, layout, k_SKD.shape[1])
        return super().attend(q_THD, k_SKD, v_SKD, layout, selection, spans)

    def attend_backward(
        self, state: BackwardState, layout: Layout, selection: Selection, spans: KeySpans | None = None
    ) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        selection, spans = self._with_window(selection, state.q, layout, state.k.shape[1])
        return super().attend_backward(state, layout, selection, spans)

    def with_window(self, selected_HTC: Tensor, layout: Layout) -> Tensor:
        """int32 [H, T, C]: the selected and the local blocks."""
        return with_local_blocks(selected_HTC, self.local.history(layout), self.local.most(layout))

    def _with_window(
        self, selection: Selection, q_THD: Tensor, layout: Layout, kv_heads: int
    ) -> tuple[Selection, KeySpans | None]:
        """The selection as `BlockAttention` takes it, and the spans of local blocks; None where these are among the
        selected."""
        # Asked in each call: around a ring, another backend may take the call than the one that made the selection.
        if self.takes_spans(q_THD, layout, selection[0].shape[2]):
            return selection, self.local.spans(layout)
        return self.selection(self.with_window(selection[0], layout), q_THD, layout, kv_heads), None


class WindowByUnit(BlocksByUnit):
    """One block at a time: the window's blocks are units that every query selects."""

    attention: "MobaWindowAttention"

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """A tensor of the shape and dtype of `select`'s, contents undefined."""
        (units_HTC,) = super().empty_selection(q_THD, k_SKD, layout)
        if self.attention.is_full(layout):
            return (units_HTC,)
        heads, tokens, selected = units_HTC.shape
        window = self.attention.blocks.local.most(layout)
        return (units_HTC.new_empty((heads, tokens, selected + window)),)


class MobaWindowAttention(MobaAttention, OffersUnits):
    """MoBA whose queries also attend to the blocks of the `window` tokens before their own block."""

    class Options(MobaAttention.Options):
        """Options of `kind: moba_window`."""

        window: Length = Field(
            512,
            description="tokens before a query's own block to which it also attends, whole blocks; topk does not count "
            "them, and the gate selects among the blocks before them",
        )

        def contradictions(self) -> Iterator[str]:
            """Contradictions among these options, each text beginning with the option."""
            if rest := self.window % self.block_size:
                near = {self.window - rest, self.window - rest + self.block_size} - {0}
                yield (
                    f"window: given {self.window}, no multiple of block_size {self.block_size}; allowed: whole blocks, "
                    f"such as {' or '.join(map(str, sorted(near)))}"
                )
            if "previous" in self.always:
                yield "always: given 'previous', a block that the window has; allowed: current, first"

    blocks: BlocksAndWindow

    def __init__(self, options: Options, head_dim: int, *, section: str) -> None:
        super().__init__(options, head_dim, section=section)
        if problems := [*options.contradictions()]:
            raise ValueError("; ".join(problems))
        self.local_blocks = 1 + options.window // options.block_size
        self.full_up_to += options.window
        local = LocalBlocks(options.block_size, self.local_blocks)
        self.blocks = BlocksAndWindow(options.block_size, self.scale, options.backend, f"{section}.backend", local)

    @property
    def by_unit(self) -> WindowByUnit:
        """This attention, one block at a time."""
        return WindowByUnit(self, self.options.history_blocks + self.local_blocks - 1)

    def select_blocks(self, q_THD: Tensor, summaries: Tensor, layout: Layout) -> Tensor:
        """int32 [H, T, C]: the selected blocks and those of the window."""
        return self.blocks.with_window(super().select_blocks(q_THD, summaries, layout), layout)

    def selected_by(self, rows_n: Tensor, selection: Selection, layout: Layout) -> SelectedBlocks | None:
        """The blocks of these queries, those of the window included; None if every block is attended to."""
        if not selection:
            return None
        return SelectedBlocks(self.blocks.with_window(selection[0], layout)[:, rows_n], self.block_size)

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """`selection_statistics` of the blocks of each head, those of the window included."""
        if not selection or self.is_full(layout):
            return key_share(None, layout)
        topk = self.options.topk + self.local_blocks - 1
        choice = Choice(self.block_size, topk, int("first" in self.options.always), self.local_blocks)
        heads = (self.blocks.with_window(selected_1TC, layout).squeeze(0) for selected_1TC in selection[0].split(1))
        return selection_statistics(heads, layout, choice)


class MobaWindowKind(MobaKind):
    """Each query attends to its own block, to a window before it and to its top-k blocks of what lies before."""

    name = "moba_window"
    Options = MobaWindowAttention.Options
    options: MobaWindowAttention.Options

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """Problems of MoBA, and a window that is not made of whole blocks or holds a block that is always selected."""
        assert isinstance(options, MobaWindowAttention.Options)
        for problem in options.contradictions():
            yield f"{problem} ({context.layers})"
        yield from super().problems(options, context)

    def _attention(self) -> MobaWindowAttention:
        return MobaWindowAttention(self.options, self.head_dim, section=f"attention.{self.name}")

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """MoBA's, with the window's blocks among those of every query."""
        options = self.options
        blocks = options.topk + options.window // options.block_size
        return sum(attended_pairs(length, options.block_size, blocks) for length in lengths)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """MoBA's: ids of the window's blocks are not kept."""
        return super().token_bytes(model, batch._replace(seq_len=batch.seq_len - self.options.window))
