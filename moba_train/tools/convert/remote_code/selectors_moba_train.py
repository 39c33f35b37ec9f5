"""Kinds of attention to blocks that something else than mean keys selects.

- `msa`: MiniMax Sparse Attention (arXiv:2606.13392): the blocks whose best tokens an index branch scores highest.
- `qsa`, after Qwen's sparse attention: entries of a few tokens, by the mean of their index keys.
- `seer`: SeerAttention (Gao et al. 2024, arXiv:2410.13276): all queries of a block share the blocks that a gate on
  pooled queries and keys selects.
- `infllm_v2` (Zhao et al. 2025, arXiv:2509.24663): the first blocks, those next to the query, and the blocks with the
  best windows of mean keys, shared by the heads of a key/value head.

Shape suffixes as in attention_moba_train.py, and w width of an index or a gate, W windows, n blocks of queries.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_moba_train import (
    Call,
    Kind,
    New,
    Rotary,
    attend_to_blocks,
    best_blocks,
    full_attention,
    norm_of,
    shape_of,
)
from .cache_moba_train import Kept, Texts, wide


class Msa(Kind):
    """Kind `msa`."""

    OPTIONS = frozenset({"mode", "block_size", "topk", "index_dim", "train_gate", "kl_weight"})
    takes_sink = False

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.width = options.get("index_dim") or config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.key_heads(config) * self.width, bias=False)
        self.q_norm, self.k_norm = (self.norm(config) for _ in range(2))
        self.q_index_BKTw: Tensor | None = None

    def key_heads(self, config: Any) -> int:
        """Index keys of a token."""
        return 1

    def norm(self, config: Any) -> nn.Module:
        """Norm of index queries or keys, in models that normalise queries and keys."""
        return norm_of(config, self.width) if shape_of(config)["qk_norm"] else nn.Identity()

    def prepare(self, new: New, rotate: Rotary, store: Kept, texts: Texts) -> Tensor:
        """The keys; keeps index queries [B, K, T, w] for the call that follows, and index keys of all tokens."""
        q_BTKw, k_BTKw = (x(new.x).unflatten(-1, (-1, self.width)) for x in (self.q_proj, self.k_proj))
        self.q_index_BKTw = rotate(self.q_norm(q_BTKw).transpose(1, 2))
        store.append("index", rotate(self.k_norm(k_BTKw).transpose(1, 2)))
        return new.k

    def scores(self, q_BKtw: Tensor, k_BKNbw: Tensor) -> Tensor:
        """Scores [B, K, t, N] of complete blocks: here, that of the best token."""
        return (q_BKtw @ k_BKNbw.flatten(2, 3).transpose(2, 3)).unflatten(-1, k_BKNbw.shape[2:4]).amax(-1)

    def forward(self, call: Call) -> Tensor:
        if self.options.get("mode") == "warmup":
            return full_attention(call, self.implementation)
        assert self.q_index_BKTw is not None
        dtype = wide(call.q.dtype)
        block_size = self.options["block_size"]
        q_BKTw = self.q_index_BKTw[call.text.rows, :, -call.q.shape[2] :].detach().to(dtype)
        k_BKSw = call.store.rows["index"][call.text.rows, :, call.text.first :].detach().to(dtype)
        complete = call.k.shape[2] // block_size
        k_BKNbw = k_BKSw[:, :, : complete * block_size].unflatten(2, (complete, block_size))

        def choose(part: slice, positions_t1: Tensor, ids_N: Tensor) -> Tensor:
            own_t1 = positions_t1 // block_size
            scores_BKtN = self.scores(q_BKTw[:, :, part], k_BKNbw)
            scores_BKtN = F.pad(scores_BKtN, (0, len(ids_N) - complete))
            return best_blocks(scores_BKtN, ids_N < own_t1, self.options["topk"] - 1) | (ids_N == own_t1)

        return attend_to_blocks(call, choose, block_size, width=call.k.shape[2])


class Qsa(Msa):
    """Kind `qsa`."""

    def key_heads(self, config: Any) -> int:
        return int(config.num_key_value_heads)

    def norm(self, config: Any) -> nn.Module:
        return norm_of(config, self.width)

    def scores(self, q_BKtw: Tensor, k_BKNbw: Tensor) -> Tensor:
        """Scores of the mean index keys."""
        return q_BKtw @ k_BKNbw.mean(3).transpose(2, 3)


class Seer(Kind):
    """Kind `seer`. Tokens behind a prompt attend to every token before, as the mean query of their block is not known
    yet; the prompt comes in one call."""

    OPTIONS = frozenset({"mode", "block_size", "topk", "threshold", "gate_dim", "train_gate", "kl_weight"})
    takes_sink = False

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        width = options.get("gate_dim") or config.head_dim
        self.q_weight = nn.Parameter(torch.zeros(config.num_attention_heads, config.head_dim, width))
        self.k_weight = nn.Parameter(torch.zeros(config.num_key_value_heads, 3 * config.head_dim, width))

    def forward(self, call: Call) -> Tensor:
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

    OPTIONS = frozenset({"block_size", "topk", "first_blocks", "local_blocks", "window", "stride", "dense_len"})
    takes_sink = False

    def attend_to_all(self, call: Call) -> Tensor:
        call.store.mean_keys(call, self.options["stride"])
        return super().attend_to_all(call)

    def forward(self, call: Call) -> Tensor:
        options = self.options
        block_size = options["block_size"]
        if call.k.shape[2] <= max(options["dense_len"], options["topk"] * block_size):
            return self.attend_to_all(call)
        units_BKUd = call.store.mean_keys(call, options["stride"]).to(wide(call.q.dtype))
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


KINDS: dict[str, type[Kind]] = {"msa": Msa, "qsa": Qsa, "seer": Seer, "infllm_v2": InfLLMV2}
