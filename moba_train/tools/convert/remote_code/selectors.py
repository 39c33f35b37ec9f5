"""Kinds of block-sparse attention that something else than mean keys selects.

- `msa`: MiniMax Sparse Attention (arXiv:2606.13392): the blocks whose best tokens an index branch scores highest.
- `qsa`, after Qwen's sparse attention: entries of a few tokens, by the mean of their index keys.
- `indexer`, after DeepSeek Sparse Attention (arXiv:2512.02556): as `qsa`, with first and last blocks and, of the
  others, a fixed number or a share of the scores; several index queries with weights; a search inside of MoBA's blocks.
- `seer`: SeerAttention (Gao et al. 2024, arXiv:2410.13276): all queries of a block share the blocks that a gate on
  pooled queries and keys selects.
- `infllm_v2` (Zhao et al. 2025, arXiv:2509.24663): the first blocks, those next to the query, and the blocks with the
  best windows of mean keys, shared by the heads of a key/value head.

Shape suffixes as in `attention`, and w width of an index or a gate, W windows, n blocks of queries, I index
queries of a key/value head, f features of a query: its index queries, and their weights if it has any.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import (
    KINDS,
    Call,
    Kind,
    New,
    Rotary,
    attend_to_blocks,
    best_blocks,
    choose_by_means,
    full_attention,
    norm_of,
    shape_of,
)
from .cache import Kept, Texts, wide


class Msa(Kind):
    """Kind `msa`."""

    takes_sink = False

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.width = options.get("index_dim") or config.head_dim
        queries = config.num_key_value_heads * (options.get("index_heads") or 1)
        self.q_proj = nn.Linear(config.hidden_size, queries * self.width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.key_heads(config) * self.width, bias=False)
        self.q_norm, self.k_norm = (self.norm(config) for _ in range(2))
        self.features_BKTf: Tensor | None = None

    def key_heads(self, config: Any) -> int:
        """Index keys of a token."""
        return int(config.num_key_value_heads) if self.options.get("index_keys") == "group" else 1

    def norm(self, config: Any) -> nn.Module:
        """Norm of index queries or keys, in models that normalise queries and keys."""
        return norm_of(config, self.width) if shape_of(config)["qk_norm"] else nn.Identity()

    @torch.no_grad()
    def prepare(self, new: New, rotate: Rotary, store: Kept, texts: Texts) -> Tensor:
        """The keys; keeps the features of queries for the call that follows, and index keys of all tokens, both without
        a graph, with which a module could not be copied."""
        q_BTJw, k_BTKw = (x(new.x).unflatten(-1, (-1, self.width)) for x in (self.q_proj, self.k_proj))
        q_BJTw = rotate(self.q_norm(q_BTJw).transpose(1, 2))
        self.features_BKTf = q_BJTw.unflatten(1, (new.k.shape[1], -1)).transpose(2, 3).flatten(3)
        store.append("index", rotate(self.k_norm(k_BTKw).transpose(1, 2)))
        return new.k

    def scores(self, q_BKtf: Tensor, k_BKNbw: Tensor) -> Tensor:
        """Scores [B, K, t, N] of complete blocks: here, that of the best token."""
        return (q_BKtf @ k_BKNbw.flatten(2, 3).transpose(2, 3)).unflatten(-1, k_BKNbw.shape[2:4]).amax(-1)

    def chooser(self, call: Call) -> Callable[[Tensor, slice, Tensor, Tensor], Tensor]:
        """The choice from scores [B, K, t, N], and what `Choose` is given."""

        def best(scores_BKtN: Tensor, part: slice, positions_t1: Tensor, ids_N: Tensor) -> Tensor:
            own_t1 = positions_t1 // self.options["block_size"]
            return best_blocks(scores_BKtN, ids_N < own_t1, self.options["topk"] - 1) | (ids_N == own_t1)

        return best

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        if to_all or self.options.get("mode") == "warmup":
            return full_attention(call, self.implementation)
        assert self.features_BKTf is not None
        dtype = wide(call.q.dtype)
        block_size = self.options["block_size"]
        q_BKTf = self.features_BKTf[call.text.rows, :, -call.q.shape[2] :].to(dtype)
        k_BKSw = call.store.rows["index"][call.text.rows, :, call.text.first :].to(dtype)
        complete = call.k.shape[2] // block_size
        k_BKNbw = k_BKSw[:, :, : complete * block_size].unflatten(2, (complete, block_size))
        best = self.chooser(call)

        def choose(part: slice, positions_t1: Tensor, ids_N: Tensor) -> Tensor:
            scores_BKtN = F.pad(self.scores(q_BKTf[:, :, part], k_BKNbw), (0, len(ids_N) - complete))
            return best(scores_BKtN, part, positions_t1, ids_N)

        return attend_to_blocks(call, choose, block_size, width=call.k.shape[2])


class Qsa(Msa):
    """Kind `qsa`."""

    def key_heads(self, config: Any) -> int:
        return int(config.num_key_value_heads)

    def norm(self, config: Any) -> nn.Module:
        return norm_of(config, self.width)

    def scores(self, q_BKtf: Tensor, k_BKNbw: Tensor) -> Tensor:
        """Scores of the mean index keys."""
        return q_BKtf @ k_BKNbw.mean(3).transpose(2, 3)


class Indexer(Qsa):
    """Kind `indexer`."""

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.index_heads: int = options.get("index_heads") or 0
        self.coarse: dict[str, int] = options.get("coarse") or {}
        if unknown := sorted(self.coarse.keys() - {"block_size", "blocks"}):
            raise ValueError(f"moba.layers: coarse has {unknown[0]!r}, allowed: block_size, blocks")
        if self.index_heads:
            number = config.num_key_value_heads * self.index_heads
            self.weights = nn.Linear(config.hidden_size, number, bias=False)

    def norm(self, config: Any) -> nn.Module:
        return Msa.norm(self, config)

    @torch.no_grad()
    def prepare(self, new: New, rotate: Rotary, store: Kept, texts: Texts) -> Tensor:
        """As in `Msa`, with the weights of index queries among the features."""
        keys = super().prepare(new, rotate, store, texts)
        if self.index_heads:
            assert self.features_BKTf is not None
            weights_BKTI = self.weights(new.x).unflatten(-1, (-1, self.index_heads)).transpose(1, 2)
            self.features_BKTf = torch.cat([self.features_BKTf, weights_BKTI], -1)
        return keys

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        if to_all and self.coarse:
            call.store.mean_keys(call, self.coarse["block_size"])
        return super().forward(call, to_all)

    def scores(self, q_BKtf: Tensor, k_BKNbw: Tensor) -> Tensor:
        """Products of the mean index keys; of several index queries, the weighted sum of the positive ones."""
        k_BKwN = k_BKNbw.mean(3).transpose(2, 3) * self.width**-0.5
        if not self.index_heads:
            return q_BKtf @ k_BKwN
        q_BKty, weights_BKtI = q_BKtf.split([self.index_heads * self.width, self.index_heads], -1)
        scores_BKtN = q_BKtf.new_zeros(*q_BKtf.shape[:3], k_BKwN.shape[-1])
        for q_BKtw, weight_BKt1 in zip(q_BKty.split(self.width, -1), weights_BKtI.split(1, -1), strict=True):
            scores_BKtN += (q_BKtw @ k_BKwN).relu() * weight_BKt1
        return scores_BKtN * self.index_heads**-0.5

    def chooser(self, call: Call) -> Callable[[Tensor, slice, Tensor, Tensor], Tensor]:
        options = self.options
        block_size: int = options["block_size"]
        always = frozenset({"previous", "first"})
        coarse_size = self.coarse.get("block_size", 0)
        search = choose_by_means(call, coarse_size, self.coarse["blocks"], True, always) if self.coarse else None
        top_p: float | None = options.get("top_p")

        def best(scores_BKtN: Tensor, part: slice, positions_t1: Tensor, ids_N: Tensor) -> Tensor:
            own_t1 = positions_t1 // block_size
            scores_BKtN = scores_BKtN.masked_fill(ids_N >= own_t1, -torch.inf)
            if search is not None:
                coarse_n = torch.arange(-(-len(ids_N) * block_size // coarse_size), device=ids_N.device)
                inside_BKtN = search(part, positions_t1, coarse_n)[..., ids_N * block_size // coarse_size]
                scores_BKtN = scores_BKtN.masked_fill(~inside_BKtN, -torch.inf)
            forced_tN = (ids_N < options["first_blocks"]) | (ids_N > own_t1 - options["local_blocks"])
            forced_BKtN = forced_tN & (scores_BKtN > -torch.inf)
            before_tN = ids_N < own_t1
            ranked_BKtN = scores_BKtN.masked_fill(forced_BKtN, torch.inf)
            chosen_BKtN = best_blocks(ranked_BKtN, before_tN, options["topk"] - 1)
            if top_p is not None:
                chosen_BKtN &= forced_BKtN | _enough(scores_BKtN, chosen_BKtN, forced_BKtN, top_p)
            return chosen_BKtN | (ids_N == own_t1)

        return best


def _enough(scores_BKtN: Tensor, chosen_BKtN: Tensor, forced_BKtN: Tensor, top_p: float) -> Tensor:
    """Mask of the chosen blocks, forced ones first and then the best, the fewest whose shares in the softmax of all
    scores add up to `top_p`."""
    share_BKtN = (scores_BKtN - scores_BKtN.logsumexp(-1, keepdim=True)).exp().masked_fill(~chosen_BKtN, 0.0)
    order_BKtN = (share_BKtN + 2 * (forced_BKtN & chosen_BKtN)).sort(dim=-1, descending=True, stable=True).indices
    ordered_BKtN = share_BKtN.gather(-1, order_BKtN)
    needed_BKtN = ordered_BKtN.cumsum(-1) - ordered_BKtN < top_p  # without the block itself
    return torch.zeros_like(chosen_BKtN).scatter_(-1, order_BKtN, needed_BKtN)


class Seer(Kind):
    """Kind `seer`. Tokens behind a prompt attend to every token before, as the mean query of their block is not known
    yet; the prompt comes in one call."""

    takes_sink = False
    in_parts = False

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        width = config.head_dim
        self.q_weight = nn.Parameter(torch.zeros(config.num_attention_heads, width, width))
        self.k_weight = nn.Parameter(torch.zeros(config.num_key_value_heads, 3 * width, width))

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        new, tokens = call.q.shape[2], call.k.shape[2]
        if self.options.get("mode") == "warmup" or new < tokens:
            return full_attention(call, self.implementation)
        block_size = self.options["block_size"]
        scores_BHnN = self.gate(call).detach()
        ids_N = torch.arange(scores_BHnN.shape[-1], device=call.q.device)
        scores_BHnN = scores_BHnN.masked_fill(ids_N > ids_N[:, None], -torch.inf)
        threshold = self.options.get("threshold")
        if threshold is not None:
            scores_BHnN = scores_BHnN.masked_fill(scores_BHnN.softmax(-1) <= threshold, -torch.inf)
        chosen_BHnN = best_blocks(scores_BHnN, ids_N < ids_N[:, None], self.options["topk"] - 1)
        chosen_BHnN = chosen_BHnN | (ids_N == ids_N[:, None])

        def choose(part: slice, positions_t1: Tensor, ids_N: Tensor) -> Tensor:
            return chosen_BHnN[:, :, positions_t1[:, 0] // block_size]

        return attend_to_blocks(call, choose, block_size, width=len(ids_N))

    def gate(self, call: Call) -> Tensor:
        """Scores [B, H, n, N] of all blocks for each block of queries: of the mean of q, and mean, maximum and minimum
        of k, each rotated at its block's first token."""
        block_size = self.options["block_size"]
        dtype = wide(call.q.dtype)
        parts = [[x.to(dtype) for x in tensor.split(block_size, 2)] for tensor in (call.new.q, call.new.k)]
        q_BHnd = torch.stack([x.mean(2) for x in parts[0]], 2).to(call.q.dtype)
        pooled = [torch.cat([x.mean(2), x.amax(2), x.amin(2)], -1) for x in parts[1]]
        k_BKNp = torch.stack(pooled, 2).to(call.q.dtype)
        positions_N = torch.arange(len(pooled), device=call.q.device) * block_size
        q_BHnw = call.rotate.at(q_BHnd @ self.q_weight, positions_N).to(dtype)
        k_BKNw = call.rotate.at(k_BKNp @ self.k_weight, positions_N).to(dtype)
        k_BHNw = k_BKNw.repeat_interleave(q_BHnw.shape[1] // k_BKNw.shape[1], 1)
        return q_BHnw @ k_BHNw.transpose(2, 3) * q_BHnw.shape[-1] ** -0.5


class InfLLMV2(Kind):
    """Kind `infllm_v2`."""

    takes_sink = False

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        options = self.options
        block_size = options["block_size"]
        units_BKUd = call.store.mean_keys(call, options["stride"])
        if to_all or call.k.shape[2] <= max(options["dense_len"], options["topk"] * block_size):
            return full_attention(call, self.implementation)
        units_BKUd = units_BKUd.to(wide(call.q.dtype))
        per_window = options["window"] // options["stride"]
        windows_BKWd = units_BKUd.unfold(2, per_window, 1).mean(-1).to(call.k.dtype)

        def choose(part: slice, positions_t1: Tensor, ids_N: Tensor) -> Tensor:
            own_t1 = positions_t1 // block_size
            local_t1 = (own_t1 - options["local_blocks"] + 1).masked_fill(positions_t1 < options["dense_len"], 0)
            scores_BKtN = self.scores(call.q[:, :, part], windows_BKWd, positions_t1, len(ids_N))
            count = options["topk"] - options["local_blocks"]
            first_N = (ids_N < options["first_blocks"])[None]
            chosen_BKtN = best_blocks(scores_BKtN, ids_N < local_t1, count, first_N)
            return chosen_BKtN | ((local_t1 <= ids_N) & (ids_N <= own_t1))

        width = max(windows_BKWd.shape[2], call.k.shape[2] // block_size)
        return attend_to_blocks(call, choose, block_size, width)

    def scores(self, q_BHtd: Tensor, windows_BKWd: Tensor, positions_t1: Tensor, blocks: int) -> Tensor:
        """Scores [B, K, t, N]: the largest share of attention, summed over the heads of a key/value head, among the
        windows that overlap a block."""
        options = self.options
        stride = options["stride"]
        _, kv_heads, windows, d = windows_BKWd.shape
        q_BKGtd = q_BHtd.detach().unflatten(1, (kv_heads, -1))
        logits_BKGtW = q_BKGtd @ windows_BKWd.detach()[:, :, None].transpose(3, 4) * d**-0.5
        complete_tW = torch.arange(windows, device=q_BHtd.device) * stride + options["window"] <= positions_t1 + 1
        # The lowest number, not -inf: a query that sees no window would have a softmax of NaN.
        logits_BKGtW = logits_BKGtW.masked_fill(~complete_tW, torch.finfo(logits_BKGtW.dtype).min)
        mass_BKtW = logits_BKGtW.softmax(-1, dtype=wide(q_BHtd.dtype)).sum(2)
        # Windows that overlap a block: some begin before it.
        before = options["window"] // stride - 1
        per_block = options["block_size"] // stride
        mass_BKtW = F.pad(mass_BKtW, (before, max(0, blocks * per_block - windows)))
        return mass_BKtW.unfold(-1, before + per_block, per_block)[..., :blocks, :].amax(-1)


KINDS.update(msa=Msa, qsa=Qsa, indexer=Indexer, seer=Seer, infllm_v2=InfLLMV2)
