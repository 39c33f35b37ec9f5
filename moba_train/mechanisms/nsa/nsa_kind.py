"""The kind `nsa`: three branches from the same queries, added with gates (arXiv:2502.11089, section 3).

A layer's parameters are its gates, the compression, and the branches' own projections.

Shape suffixes: n tokens of this layer, T tokens of the sequence, N compressed blocks of L tokens, D hidden size, H
query heads, K key/value heads, d head width, C selected blocks of a query, R ranks, S blocks of a rank.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moba_train.attention.block_sparse import BlockOptions, GivenBlocks, refused_triton, too_long
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common.selection import SELECTION
from moba_train.attention.kernels.table import triton_problem
from moba_train.attention.kind import AttentionKind, LayerInput, MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import layout_arguments
from moba_train.attention.moba.moba_kind import attended_pairs
from moba_train.attention.observer import statistics_observer
from moba_train.attention.shard import Shard, attends_to_all, own_rows, padded
from moba_train.attention.statistics import SOFTMAX, Statistics
from moba_train.config.base import Length
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.nsa import selection as operators
from moba_train.mechanisms.nsa.compressed import CompressedAttention, CompressedBlocks
from moba_train.mechanisms.window import WindowAttention


class Compression(nn.Module):
    """One vector from the L vectors of a block: a position embedding is added to each, then an MLP, as wide inside as a
    head, takes all of them. Key/value heads share it."""

    def __init__(self, block: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(block, width))
        self.up = nn.Linear(block * width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x_TKd: Tensor, first_N: Tensor) -> Tensor:
        """[N, K, d] from the vectors of all tokens and each block's first token; the backward pass gathers the blocks
        again."""
        compressed: Tensor = checkpoint(self._compress, x_TKd, first_N, use_reentrant=False, preserve_rng_state=False)
        return compressed

    def _compress(self, x_TKd: Tensor, first_N: Tensor) -> Tensor:
        tokens_NL = first_N.unsqueeze(-1) + torch.arange(len(self.positions), device=first_N.device)
        # Ids of no block, up to the bound that the host knows, may reach beyond the end; no query sees what they give.
        tokens_NL = tokens_NL.clamp(max=len(x_TKd) - 1)
        x_NLKd = x_TKd.index_select(0, tokens_NL.flatten()).unflatten(0, tokens_NL.shape)
        x_NLKd = x_NLKd + self.positions.unsqueeze(1)
        hidden = F.gelu(self.up(x_NLKd.transpose(1, 2).flatten(2)))
        return self.down(hidden)


class KeysAndValues(nn.Module):
    """A branch's own keys and values, as the layer makes its own."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.head_width
        self.width = width
        self.k_proj = nn.Linear(model.hidden_size, model.kv_heads * width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, model.kv_heads * width, bias=model.qkv_bias)
        self.k_norm = nn.RMSNorm(width, model.norm_eps) if model.qk_norm else nn.Identity()

    def forward(self, x_nD: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n, K, d], before the rotary embedding."""
        k_nKd = self.k_proj(x_nD).unflatten(-1, (-1, self.width))
        return self.k_norm(k_nKd), self.v_proj(x_nD).unflatten(-1, (-1, self.width))


class NsaParameters(nn.Module):
    """All parameters of one layer."""

    def __init__(self, model: ModelConfig, compressed_block: int) -> None:
        super().__init__()
        self.gates = nn.Linear(model.hidden_size, 3 * model.heads, bias=False)
        self.compress_k = Compression(compressed_block, model.head_width)
        self.compress_v = Compression(compressed_block, model.head_width)
        self.compressed = KeysAndValues(model)
        self.window = KeysAndValues(model)


BRANCHES = ("compressed", "selected", "window")
"""Names of the branches, in the order of their gates."""


class NsaOptions(BlockOptions):
    """Options of `kind: nsa`; the defaults are the paper's."""

    not_here = {
        "hidden": "gone: the MLPs that compress are as wide as a head",
        "separate_kv": "gone: the branches have projections of their own, as in the paper",
    }

    compressed_block: Length = Field(32, description="tokens of a compressed block")
    stride: Length = Field(16, description="tokens from one compressed block to the next; divides compressed_block")
    block_size: Length = Field(
        64, description="tokens of a selected block; a multiple of stride, at least compressed_block"
    )
    topk: int = Field(16, ge=1, description="selected blocks of each query, its own and the forced ones included")
    first: int = Field(1, ge=0, description="blocks at a document's start that are always selected")
    local: int = Field(2, ge=1, description="blocks that are always selected before and with the query's own")
    window: Length = Field(512, description="tokens of the sliding window, the query's own included")


class SequenceKeysAndValues(NamedTuple):
    """Keys and values of all tokens, [T, K, d] each."""

    k: Tensor
    v: Tensor


class NsaKind(AttentionKind):
    """Compressed, selected and sliding-window attention; the compressed branch's probabilities select the blocks."""

    name = "nsa"
    Options = NsaOptions
    options: NsaOptions
    statistics = SOFTMAX | SELECTION | {f"gate_{branch}": f"gate of the {branch} branch" for branch in BRANCHES}

    def __init__(self, options: NsaOptions, head_dim: int) -> None:
        super().__init__(options, head_dim)
        if problems := list(_contradictions(options, "")):
            raise ValueError("; ".join(problems))
        self.blocks = CompressedBlocks(options.compressed_block, options.stride)
        self.compressed = CompressedAttention(self.blocks, head_dim, options.backend)
        sizes = options.block_size, options.history_blocks, head_dim
        backend = options.backend, "attention.nsa.backend"
        self.selected = GivenBlocks(*sizes, *backend, first=options.first, local=options.local)
        self.window = WindowAttention(options.window, head_dim, options.backend)
        self.all_blocks = FullAttention(FullAttention.Options(), head_dim)
        self.attentions = (self.compressed, self.selected, self.window)

    @classmethod
    def problems(cls, options: NsaOptions, context: StageContext) -> Iterator[str]:
        """Sizes that contradict each other, blocks longer than the sequence, and a backend that cannot run."""
        yield from _contradictions(options, f" {context.layers}")
        yield from too_long(context, options, "compressed_block", "block_size")
        reason = triton_problem(context.device, context.model.head_width, options.block_size, options.history_blocks)
        yield from refused_triton(context, options.backend, reason)

    @classmethod
    def parameters(cls, options: NsaOptions, model: ModelConfig, layer: int) -> nn.Module:
        """Gates, compression and projections."""
        return NsaParameters(model, options.compressed_block)

    @classmethod
    def full_attention(cls, options: NsaOptions, keep_windows: bool = False) -> None:
        """None: the sum of three branches is no softmax over all keys."""

    def mix(self, layer: LayerInput, parameters: NsaParameters) -> tuple[Tensor, Tensor | None]:
        """The three branches' outputs, each times its gate."""
        options = self.options
        shard = layer.engine.shard(layer.layout)
        q_nHd = own_rows(layer.rotate(layer.q_THd), shard)
        compressed, selected, window = self._keys_and_values(layer, shard, parameters)
        where = layout_arguments(shard.layout)
        compressed_blocks = (self.blocks.size, self.blocks.stride)
        first_N, positions_N = operators.places(*where, *compressed_blocks)
        # Compressed before they are rotated, so that the MLP does not see where in its document a block is.
        k_NKd = layer.rotate_at(_compressed(shard, parameters.compress_k, compressed.k, first_N), positions_N)
        v_NKd = _compressed(shard, parameters.compress_v, compressed.v, first_N)
        # Each branch is gated where it is computed: then the backward pass has one branch's gradient at a time.
        gates_nH3 = parameters.gates(own_rows(layer.x_TD, shard)).unflatten(-1, (-1, 3)).sigmoid()
        gates = [gate_nH.unsqueeze(-1) for gate_nH in gates_nH3.unbind(-1)]
        if observer := statistics_observer(layer.engine):
            means = {f"gate_{branch}": gate.mean().item() for branch, gate in zip(BRANCHES, gates, strict=True)}
            observer.report(Statistics(means, len(q_nHd)) if len(q_nHd) else Statistics())
        out_nHd, lse_Hn = shard.attend(q_nHd, k_NKd, v_NKd, self.compressed)
        sum_nHd = out_nHd * gates[0]
        if attends_to_all(shard):
            out_nHd, _ = shard.attend(q_nHd, *selected, self.all_blocks)
        else:
            sizes = (*compressed_blocks, options.block_size, options.topk, options.first, options.local)
            scale = self.compressed.scale
            # The compressed branch's LSE normalises the probabilities that choose, so these take one pass over the
            # blocks, not two.
            chosen_HnC = operators.choose(q_nHd, k_NKd, lse_Hn, *where, *sizes, options.backend, scale)
            out_nHd, _ = shard.attend(q_nHd, *selected, self.selected, chosen_HnC)
        # Without a tensor for the product.
        sum_nHd = torch.addcmul(sum_nHd, out_nHd, gates[1])
        out_nHd, _ = shard.attend(q_nHd, *window, self.window)
        return padded(torch.addcmul(sum_nHd, out_nHd, gates[2]), len(layer.x_TD)), None

    def _keys_and_values(
        self, layer: LayerInput, shard: Shard, parameters: NsaParameters
    ) -> tuple[SequenceKeysAndValues, SequenceKeysAndValues, SequenceKeysAndValues]:
        """Keys and values of the compressed (not rotated), the selected and the window branch."""

        def gather(name: str, x_LKd: Tensor) -> Tensor:
            return shard.gather(name, own_rows(x_LKd, shard))

        selected = SequenceKeysAndValues(gather("k", layer.rotate(layer.k_TKd)), gather("v", layer.v_TKd))
        k_LKd, v_LKd = parameters.compressed(layer.x_TD)
        compressed = SequenceKeysAndValues(gather("compressed k", k_LKd), gather("compressed v", v_LKd))
        k_LKd, v_LKd = parameters.window(layer.x_TD)
        return (
            compressed,
            selected,
            SequenceKeysAndValues(gather("window k", layer.rotate(k_LKd)), gather("window v", v_LKd)),
        )

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Pairs of all three branches: of tokens, and of tokens with compressed blocks."""
        options = self.options
        selected = sum(attended_pairs(length, options.block_size, options.topk) for length in lengths)
        window = sum(window_pairs(length, options.window) for length in lengths)
        return self._compressed_pairs(lengths) + selected + window

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """The pairs of the three branches; the compressed scores once more, forward, for the selection; compression,
        gates and the branches' own projections, each forward and backward."""
        options = self.options
        width = model.head_width
        products = 12.0 * self.pairs(model, lengths) + 2.0 * self._compressed_pairs(lengths)
        compressed = 2 * model.kv_heads * sum(self.blocks.count(length) for length in lengths)
        mlp = (options.compressed_block + 1) * width * width
        projections = 3 * model.heads + 4 * model.kv_heads * width
        matrices = mlp * compressed + model.hidden_size * projections * sum(lengths)
        return model.heads * width * products + 6.0 * matrices

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Saved are the outputs of three branches, two more LSEs, gates, selected blocks and their inverse lists, keys
        and values of the branches, compressed keys and values, the rotation of the former and their first tokens;
        16-bit elements, 64-bit tokens. Activations are the compressed keys and values of other ranks' shares. Keys and
        values of the three branches are gathered."""
        options = self.options
        kv = model.kv_heads * model.head_width
        branches = 3 * 2 * model.heads * model.head_width + 2 * 4 * model.heads + 3 * 2 * model.heads
        selected = 2 * 4 * model.heads * min(options.history_blocks, batch.seq_len // options.block_size + 1)
        own = (4 + 2 * bool(model.qk_norm)) * 2 * kv
        compressed = (2 * 2 * kv + 4 * model.head_width + 8) // options.stride
        shares = 2 * batch.width * (batch.cp - 1) * kv // options.stride
        gathered = 6 * batch.width * kv
        return TokenBytes(
            branches + selected + own + compressed, shares, gathered, super().token_bytes(model, batch).workspace
        )

    def _compressed_pairs(self, lengths: Sequence[int]) -> int:
        return sum(compressed_pairs(length, self.blocks) for length in lengths)


def _compressed(shard: Shard, compression: Compression, x_TKd: Tensor, first_N: Tensor) -> Tensor:
    """[N, K, d] from the vectors of all tokens and each block's first token; every rank compresses its share.

    Shares are equal: what fills up the last ones is cut off again.
    """
    ranks = len(shard.place.ranges_by_rank)
    if ranks == 1:
        return compression(x_TKd, first_N)
    share = max(1, -(-len(first_N) // ranks))
    # Padded with the first block: an all-gather needs equal shares.
    first_RS = F.pad(first_N, (0, share * ranks - len(first_N))).unflatten(0, (ranks, share))
    return shard.all_ranks(compression(x_TKd, first_RS[shard.place.rank])).flatten(0, 1)[: len(first_N)]


def compressed_pairs(length: int, blocks: CompressedBlocks) -> int:
    """Pairs of a query and a compressed block that it sees in one document of `length` tokens."""
    rows, rest = divmod(max(0, length - blocks.size + 1), blocks.stride)
    return blocks.stride * rows * (rows + 1) // 2 + rest * (rows + 1)


def window_pairs(length: int, window: int) -> float:
    """Pairs of a query and a key in its window in one document of `length` tokens; its own key counts half."""
    growing = min(length, window)
    return growing**2 / 2 + (length - growing) * (window - 0.5)


def _contradictions(options: NsaOptions, where: str) -> Iterator[str]:
    """Options that contradict each other, each text beginning with the option; `where`: in which layers."""
    stride = options.stride
    for key in ("compressed_block", "block_size"):
        if (size := getattr(options, key)) % stride:
            yield f"{key}: given {size}{where}, which stride {stride} does not divide; allowed: multiples of stride"
    if options.block_size < options.compressed_block:
        yield (
            f"block_size: given {options.block_size}{where}, less than compressed_block {options.compressed_block}; "
            "allowed: at least compressed_block"
        )
    if options.topk < options.first + options.local:
        yield (
            f"topk: given {options.topk}{where}, but first {options.first} and local {options.local} blocks are always "
            f"selected and count towards it; allowed: >= {options.first + options.local}"
        )
