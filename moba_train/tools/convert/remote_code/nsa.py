"""The kind `nsa`: Native Sparse Attention (Yuan et al. 2025, arXiv:2502.11089, section 3).

Three branches are added with gates: attention to compressed keys, to the blocks with the largest probabilities of
these, and to a window.

Shape suffixes as in `attention`, and L tokens of a compressed block, M compressed blocks, G query heads of
a key/value head.
"""

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
    chunk_of,
    full_attention,
    shape_of,
    window_attention,
)
from .cache import Kept, Texts, wide


class Compression(nn.Module):
    """One vector from the L vectors of a block: a position embedding is added to each, then an MLP takes all."""

    def __init__(self, block: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(block, width))
        self.up = nn.Linear(block * width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x_BKSd: Tensor, stride: int) -> Tensor:
        """[B, K, M, d] of all complete blocks, which begin every `stride` tokens."""
        if x_BKSd.shape[2] < len(self.positions):
            return x_BKSd[:, :, :0]
        x_BKMLd = x_BKSd.unfold(2, len(self.positions), stride).transpose(3, 4) + self.positions
        compressed: Tensor = self.down(F.gelu(self.up(x_BKMLd.flatten(3))))
        return compressed


class KeysAndValues(nn.Module):
    """A branch's own keys and values, as the layer makes its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        shape = shape_of(config)
        self.width = config.head_dim
        sizes = config.hidden_size, config.num_key_value_heads * self.width
        self.k_proj, self.v_proj = (nn.Linear(*sizes, bias=shape["qkv_bias"]) for _ in range(2))
        self.k_norm = nn.RMSNorm(self.width, config.rms_norm_eps) if shape["qk_norm"] else nn.Identity()

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, d], before the rotary embedding."""
        k_BTKd, v_BTKd = (x(x_BTD).unflatten(-1, (-1, self.width)) for x in (self.k_proj, self.v_proj))
        return self.k_norm(k_BTKd).transpose(1, 2), v_BTKd.transpose(1, 2)


class Nsa(Kind):
    """Kind `nsa`."""

    takes_sink = False

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        sizes = options["compressed_block"], config.head_dim
        self.gates = nn.Linear(config.hidden_size, 3 * config.num_attention_heads, bias=False)
        self.compress_k, self.compress_v = Compression(*sizes), Compression(*sizes)
        self.compressed, self.window = KeysAndValues(config), KeysAndValues(config)

    def prepare(self, new: New, rotate: Rotary, store: Kept, texts: Texts) -> Tensor:
        """The keys; keeps keys and values of the other two branches for all tokens."""
        for name in ("compressed", "window"):
            k_BKTd, v_BKTd = self.get_submodule(name)(new.x)
            # Compressed before they are rotated, so that the MLP does not see where a block is.
            store.append(f"{name} keys", rotate(k_BKTd) if name == "window" else k_BKTd)
            store.append(f"{name} values", v_BKTd)
        return new.k

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        """The sum of the branches, of which one may attend to everything instead of selected blocks."""
        options = self.options
        kept = {name: rows[call.text.rows, :, call.text.first :] for name, rows in call.store.rows.items()}
        k_BKMd = self.compress_k(kept["compressed keys"], options["stride"])
        v_BKMd = self.compress_v(kept["compressed values"], options["stride"])
        k_BKMd = call.rotate.at(k_BKMd, torch.arange(k_BKMd.shape[2], device=k_BKMd.device) * options["stride"])
        before = call.k.shape[2] - call.q.shape[2]

        def choose(part: slice, positions_t1: Tensor, ids_N: Tensor) -> Tensor:
            own_t1 = positions_t1 // options["block_size"]
            p_BKGtM = self.probabilities(call.q[:, :, part].detach(), k_BKMd.detach(), positions_t1)
            scores_BKtN = self.block_scores(p_BKGtM.sum(2), len(ids_N))
            forced_tN = (ids_N < options["first"]) | (ids_N > own_t1 - options["local"])
            return best_blocks(scores_BKtN, ids_N < own_t1, options["topk"] - 1, forced_tN) | (ids_N == own_t1)

        chunk = chunk_of(call.q.shape[0] * call.q.shape[1] * k_BKMd.shape[2])
        outs = []
        for begin in range(0, call.q.shape[2], chunk):
            q_BHtd = call.q[:, :, begin : begin + chunk]
            positions_t1 = torch.arange(q_BHtd.shape[2], device=call.q.device)[:, None] + before + begin
            p_BKGtM = self.probabilities(q_BHtd, k_BKMd, positions_t1)
            outs.append((p_BKGtM @ v_BKMd.to(p_BKGtM.dtype)[:, :, None]).flatten(1, 2).to(call.q.dtype))
        width = max(k_BKMd.shape[2], call.k.shape[2] // options["block_size"])
        if to_all:
            selected = full_attention(call, self.implementation)
        else:
            selected = attend_to_blocks(call, choose, options["block_size"], width)
        near = call._replace(k=kept["window keys"], v=kept["window values"])
        window = window_attention(near, options["window"], 0, self.implementation != "eager")
        gates_3BHT1 = self.gates(call.new.x).unflatten(-1, (-1, 3)).sigmoid().permute(3, 0, 2, 1)[..., None]
        return gates_3BHT1[0] * torch.cat(outs, 2) + gates_3BHT1[1] * selected + gates_3BHT1[2] * window

    def probabilities(self, q_BHtd: Tensor, k_BKMd: Tensor, positions_t1: Tensor) -> Tensor:
        """Softmax [B, K, G, t, M] over the compressed blocks that end at the query or before; zeros without any."""
        dtype = wide(q_BHtd.dtype)
        ends_M = torch.arange(k_BKMd.shape[2], device=q_BHtd.device) * self.options["stride"]
        seen_tM = ends_M + self.options["compressed_block"] <= positions_t1 + 1
        q_BKGtd = q_BHtd.to(dtype).unflatten(1, (k_BKMd.shape[1], -1))
        scores_BKGtM = q_BKGtd @ k_BKMd.to(dtype)[:, :, None].transpose(3, 4) * q_BHtd.shape[-1] ** -0.5
        scores_BKGtM = scores_BKGtM.masked_fill(~seen_tM, torch.finfo(dtype).min)
        return scores_BKGtM.softmax(-1) * seen_tM

    def block_scores(self, p_BKtM: Tensor, blocks: int) -> Tensor:
        """Scores [B, K, t, N]: probabilities of the compressed blocks that overlap with a block, each counted once for
        every stride that the two share."""
        stride = self.options["stride"]
        per_block = self.options["block_size"] // stride
        per_compressed = self.options["compressed_block"] // stride
        offsets = torch.arange(1 - per_compressed, per_block, device=p_BKtM.device)
        shared = torch.minimum(offsets + per_compressed, torch.tensor(per_block)) - offsets.clamp(min=0)
        p_BKtM = F.pad(p_BKtM, (per_compressed - 1, max(0, blocks * per_block - p_BKtM.shape[-1])))
        windows = p_BKtM.unfold(-1, len(offsets), per_block)[..., :blocks, :]
        return windows @ shared.to(p_BKtM.dtype)


KINDS["nsa"] = Nsa
