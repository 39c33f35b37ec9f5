"""Kinds of attention of a model trained by moba_train, and what they keep in the cache of transformers.

- `full`: every token before.
- `window`: the last tokens before, and the first ones of the text (`sinks`).
- `moba`: Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189): the query's own block and the earlier blocks
  whose mean keys fit it best; with `key_conv`, of convolved keys (FlashMoBA, Xiao et al. 2025, arXiv:2511.11571).
- `msa`: MiniMax Sparse Attention (arXiv:2606.13392): the blocks whose best tokens an index branch scores highest.

A kind is a module with its own parameters, or without any. Blocks are counted from each text's first token.

Shape suffixes: B texts, T new tokens, t some of them, S all tokens, D hidden size, H query heads, K key/value heads,
d head width, w width of an index, N blocks, b tokens of a block, C selected blocks of a query, J their tokens,
X = B * K, x = t * H / K queries of a key/value head, r some of these.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

_SCORES = 2**26
"""Scores in memory at a time."""
_FEW = 16
"""New tokens up to which the keys of each query's blocks are copied."""

Rotate = Callable[[Tensor], Tensor]
"""Applies the rotary embedding of the new tokens to [B, heads, T, any even width]."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax and sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Text(NamedTuple):
    """Texts of a batch with as much padding before them, which begin at token `first`."""

    rows: slice | list[int]
    first: int


Texts = list[Text]


class BlockCacheLayer(DynamicLayer):
    """Keys and values of a layer, and what its kind of attention keeps. Cut and reordered as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled: Tensor | None = None
        """Mean key of each text's complete blocks, [B, K, N, d], counted from the text's first token."""
        self.rows: dict[str, Tensor] = {}
        """Other rows of all tokens, [B, heads, S, width], by name."""

    def append(self, name: str, new: Tensor) -> Tensor:
        """The rows of all tokens, with the new ones."""
        self.rows[name] = torch.cat([self.rows[name], new], 2) if name in self.rows else new
        return self.rows[name]

    def mean_keys(self, call: "Call", block_size: int) -> Tensor:
        """Mean keys of complete blocks, [B, K, N, d]; computed of those that the new tokens complete."""
        tokens = call.k.shape[2]
        new = call.q.shape[2]
        done = (tokens - new) // block_size
        complete = tokens // block_size
        assert self.keys is not None  # `update` came before
        if self.pooled is None:
            self.pooled = self.keys[:, :, :0]
        missing = complete - self.pooled.shape[2]
        if missing > 0:
            self.pooled = F.pad(self.pooled, (0, 0, 0, missing))
        if complete > done:
            blocks = call.k[:, :, done * block_size : complete * block_size].detach()
            means = blocks.unflatten(2, (complete - done, block_size)).to(wide(blocks.dtype)).mean(3)
            self.pooled[call.text.rows, :, done:complete] = means.to(blocks.dtype)
        return self.pooled[call.text.rows, :, :complete]

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rows = {name: change(rows) for name, rows in self.rows.items()}
        self.pooled = None if self.pooled is None else change(self.pooled)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._each(lambda x: x[indices])

    def crop(self, *arguments: Any) -> None:
        super().crop(*arguments)
        # Mean keys stay: those of blocks that are no longer complete are computed again once they are.
        self.rows = {name: rows[:, :, : self.get_seq_length()] for name, rows in self.rows.items()}

    def reset(self) -> None:
        super().reset()
        self.pooled = None
        self.rows = {}


class Call(NamedTuple):
    """Attention of some texts' new tokens, the last T of S: without padding."""

    q: Tensor
    """[B, H, T, d]"""
    k: Tensor
    """[B, K, S, d], as `v`"""
    v: Tensor
    text: Text
    store: BlockCacheLayer


def masked_attention(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, seen_TS: Tensor | None, sdpa: bool) -> Tensor:
    """Attention to the keys that a query sees; None: to all of them."""
    if sdpa:
        return F.scaled_dot_product_attention(q_BHTd, k_BKSd, v_BKSd, seen_TS, enable_gqa=True)
    dtype = wide(q_BHTd.dtype)
    k_BHSd, v_BHSd = (x.repeat_interleave(q_BHTd.shape[1] // x.shape[1], 1).to(dtype) for x in (k_BKSd, v_BKSd))
    scores = q_BHTd.to(dtype) @ k_BHSd.transpose(2, 3) * q_BHTd.shape[-1] ** -0.5
    if seen_TS is not None:
        scores = scores.masked_fill(~seen_TS, -torch.inf)
    return (scores.softmax(-1) @ v_BHSd).to(q_BHTd.dtype)


def full_attention(call: Call, sdpa: bool) -> Tensor:
    """Attention to every token before, [B, H, T, d]."""
    new = call.q.shape[2]
    tokens = call.k.shape[2]
    if sdpa and new == tokens > 1:
        return F.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True, enable_gqa=True)
    seen_TS = None
    if new > 1:
        seen_TS = torch.ones(new, tokens, dtype=torch.bool, device=call.q.device).tril(tokens - new)
    return masked_attention(call.q, call.k, call.v, seen_TS, sdpa)


def best_blocks(scores_BHtN: Tensor, own_t1: Tensor, history: int, always: list[str]) -> Tensor:
    """Mask, bool [B, H, t, N], of the blocks that each query attends to: its own, and the `history` earlier ones
    with the highest scores. What `always` names comes first among these; of equal scores, the earlier block."""
    ids_N = torch.arange(scores_BHtN.shape[-1], device=scores_BHtN.device)
    limits = torch.finfo(scores_BHtN.dtype)
    scores = scores_BHtN.clamp(limits.min, limits.max)
    forced = {"previous": ids_N == own_t1 - 1, "first": ids_N == 0}
    for name in forced.keys() & set(always):
        scores = scores.masked_fill(forced[name], torch.inf)
    scores = scores.masked_fill(ids_N >= own_t1, -torch.inf)
    best_BHtC = scores.sort(dim=-1, descending=True, stable=True).indices[..., :history]
    chosen_BHtN = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best_BHtC, True)
    return chosen_BHtN & (ids_N < own_t1) | (ids_N == own_t1)


def attend_to_blocks(call: Call, scores: Callable[[slice], Tensor], options: dict[str, Any], width: int) -> Tensor:
    """Attention to the own block and those with the highest scores, [B, H, T, d].

    scores: gives those of some new tokens, [B, H or K, t, at most N]
    width: scores that it makes of a query and head, at most
    """
    block_size = options["block_size"]
    new = call.q.shape[2]
    tokens = call.k.shape[2]
    chunk = max(1, _SCORES // (call.q.shape[0] * call.q.shape[1] * max(width, block_size)))
    attend = _attend_from_few if new <= _FEW else _attend_from_many
    out_BHTd = torch.empty_like(call.q)
    for begin in range(0, new, chunk):
        part = slice(begin, min(begin + chunk, new))
        positions_t = torch.arange(part.start, part.stop, device=call.q.device) + tokens - new
        scores_BHtN = scores(part)
        scores_BHtN = F.pad(scores_BHtN, (0, -(-tokens // block_size) - scores_BHtN.shape[-1]))
        own_t1 = (positions_t // block_size)[:, None]
        chosen_BHtN = best_blocks(scores_BHtN, own_t1, options["topk"] - 1, options.get("always", []))
        chosen_BHtN = chosen_BHtN.repeat_interleave(call.q.shape[1] // chosen_BHtN.shape[1], 1)
        out_BHTd[:, :, part] = attend(call._replace(q=call.q[:, :, part]), chosen_BHtN, positions_t, options)
    return out_BHTd


def _attend_from_few(call: Call, chosen_BHtN: Tensor, positions_t: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention by copies of the keys in each query's blocks: while tokens are generated."""
    batch, kv_heads, tokens, d = call.k.shape
    ids_BHtC = chosen_BHtN.int().argsort(dim=-1, descending=True, stable=True)[..., : options["topk"]]
    tokens_BHtCb = ids_BHtC[..., None] * options["block_size"] + torch.arange(
        options["block_size"], device=call.q.device
    )
    seen_BHtCb = chosen_BHtN.gather(-1, ids_BHtC)[..., None] & (tokens_BHtCb <= positions_t[:, None, None])
    tokens_BHtJ = tokens_BHtCb.flatten(3).clamp(max=tokens - 1)
    rows = tokens_BHtJ.view(batch, kv_heads, -1, 1).expand(-1, -1, -1, d)
    dtype = wide(call.q.dtype)
    k_BHtJd, v_BHtJd = (x.gather(2, rows).view(*tokens_BHtJ.shape, d).to(dtype) for x in (call.k, call.v))
    scores_BHtJ = (k_BHtJd @ call.q.to(dtype)[..., None]).squeeze(-1) * d**-0.5
    p_BHtJ = scores_BHtJ.masked_fill(~seen_BHtCb.flatten(3), -torch.inf).softmax(-1)
    return (p_BHtJ[..., None, :] @ v_BHtJd).squeeze(-2).to(call.q.dtype)


def _attend_from_many(call: Call, chosen_BHtN: Tensor, positions_t: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention block by block, from the queries that chose it, merged by online softmax: while a prompt is read. Its
    work is that of the chosen blocks."""
    block_size = options["block_size"]
    d = call.q.shape[-1]
    dtype = wide(call.q.dtype)
    k_XSd = call.k.flatten(0, 1)
    v_XSd = call.v.flatten(0, 1)
    q_Xxd = call.q.reshape(len(k_XSd), -1, d).to(dtype) * d**-0.5
    chosen_NXx = chosen_BHtN.reshape(*q_Xxd.shape[:2], -1).permute(2, 0, 1)
    positions_x = positions_t.repeat(call.q.shape[1] // call.k.shape[1])
    # The largest score so far is not -inf: differences stay numbers.
    largest_Xx = torch.full_like(q_Xxd[..., 0], torch.finfo(dtype).min)
    sum_Xx = torch.zeros_like(largest_Xx)
    out_Xxd = torch.zeros_like(q_Xxd)
    for block, most in enumerate(chosen_NXx.sum(-1).amax(-1).tolist()):
        if most == 0:
            continue
        # The queries that chose the block come first; heads that have fewer of them get others, which see nothing.
        rows_Xr = chosen_NXx[block].int().argsort(dim=1, descending=True, stable=True)[:, :most]
        rows_Xrd = rows_Xr[..., None].expand(-1, -1, d)
        k_Xbd, v_Xbd = (x[:, block * block_size :][:, :block_size].to(dtype) for x in (k_XSd, v_XSd))
        positions_b = torch.arange(k_Xbd.shape[1], device=call.q.device) + block * block_size
        seen_Xrb = chosen_NXx[block].gather(1, rows_Xr)[..., None] & (positions_b <= positions_x[rows_Xr][..., None])
        scores_Xrb = (q_Xxd.gather(1, rows_Xrd) @ k_Xbd.transpose(1, 2)).masked_fill(~seen_Xrb, -torch.inf)
        before_Xr = largest_Xx.gather(1, rows_Xr)
        after_Xr = torch.maximum(before_Xr, scores_Xrb.amax(-1))
        p_Xrb = (scores_Xrb - after_Xr[..., None]).exp()
        keep_Xr = (before_Xr - after_Xr).exp()
        out_Xrd = out_Xxd.gather(1, rows_Xrd) * keep_Xr[..., None] + p_Xrb @ v_Xbd
        out_Xxd = out_Xxd.scatter(1, rows_Xrd, out_Xrd)
        sum_Xx = sum_Xx.scatter(1, rows_Xr, sum_Xx.gather(1, rows_Xr) * keep_Xr + p_Xrb.sum(-1))
        largest_Xx = largest_Xx.scatter(1, rows_Xr, after_Xr)
    return (out_Xxd / sum_Xx[..., None]).view_as(call.q).to(call.q.dtype)


def head_norm(config: Any, width: int) -> nn.Module:
    """RMSNorm of queries and keys, in models that have it."""
    return nn.RMSNorm(width, config.rms_norm_eps) if config.model_type == "qwen3" else nn.Identity()


class Kind(nn.Module):
    """Kind of attention of a layer, with its own parameters if it has any. Here: `full`."""

    OPTIONS: frozenset[str] = frozenset()

    def __init__(self, config: Any, options: dict[str, Any]) -> None:
        super().__init__()
        unknown = sorted(options.keys() - self.OPTIONS - {"kind"})
        if unknown:
            raise ValueError(f"moba.layers: {options['kind']} has {unknown[0]!r}, allowed: {', '.join(self.OPTIONS)}")
        self.options = options
        self.sdpa = config._attn_implementation != "eager"

    def prepare(self, x_BTD: Tensor, k_BKTd: Tensor, rotate: Rotate, store: BlockCacheLayer, texts: Texts) -> Tensor:
        """Keys of the new tokens before the rotary embedding, from the layer's normalised input and its keys."""
        return k_BKTd

    def forward(self, call: Call) -> Tensor:
        """The output [B, H, T, d]."""
        return full_attention(call, self.sdpa)


class Window(Kind):
    """Kind `window`."""

    OPTIONS = frozenset({"window", "sinks"})

    def forward(self, call: Call) -> Tensor:
        window = self.options["window"]
        sinks = self.options.get("sinks", 0)
        tokens = call.k.shape[2]
        new = call.q.shape[2]
        out_BHTd = torch.empty_like(call.q)
        for begin in range(0, new, max(window, 128)):
            part = slice(begin, min(begin + max(window, 128), new))
            at_T1 = torch.arange(tokens - new, tokens, device=call.q.device)[:, None]
            first = max(0, tokens - new + begin - window + 1)
            keys_s = torch.arange(tokens - new + part.stop, device=call.q.device)
            keys_s = torch.cat([keys_s[: min(sinks, first)], keys_s[first:]])
            seen_ts = (keys_s <= at_T1[part]) & ((at_T1[part] - keys_s < window) | (keys_s < sinks))
            some = call.q[:, :, part], call.k[:, :, keys_s], call.v[:, :, keys_s]
            out_BHTd[:, :, part] = masked_attention(*some, seen_ts, self.sdpa)
        return out_BHTd


class Moba(Kind):
    """Kind `moba`."""

    OPTIONS = frozenset({"block_size", "topk", "select", "always", "key_conv"})

    def __init__(self, config: Any, options: dict[str, Any]) -> None:
        super().__init__(config, options)
        self.width = options.get("key_conv", 0)
        if self.width:
            self.weight = nn.Parameter(torch.zeros(config.num_key_value_heads * config.head_dim, self.width))

    def prepare(self, x_BTD: Tensor, k_BKTd: Tensor, rotate: Rotate, store: BlockCacheLayer, texts: Texts) -> Tensor:
        """k + silu(sum over l < width of weight_l * the key of l tokens before)."""
        if not self.width:
            return k_BKTd
        before = store.get_seq_length()
        k_BKTd = k_BKTd.clone()
        for text in texts:
            k_BKTd[text.rows, :, : max(0, text.first - before)] = 0  # padding is no key of a text
        _, kv_heads, new, d = k_BKTd.shape
        rows_BKsd = F.pad(store.append("keys", k_BKTd), (0, 0, self.width - 1, 0))
        taps = self.weight.T.view(self.width, 1, kv_heads, 1, d)
        ends = range(rows_BKsd.shape[2], rows_BKsd.shape[2] - self.width, -1)
        mixed = sum(tap * rows_BKsd[:, :, end - new : end] for tap, end in zip(taps, ends, strict=True))
        return k_BKTd + F.silu(mixed)

    def forward(self, call: Call) -> Tensor:
        dtype = wide(call.q.dtype)
        pooled_BKdN = call.store.mean_keys(call, self.options["block_size"]).to(dtype).transpose(2, 3)

        def scores(part: slice) -> Tensor:
            q_BKxd = call.q[:, :, part].detach().to(dtype).unflatten(1, (call.k.shape[1], -1)).flatten(2, 3)
            scores_BKGtN = (q_BKxd @ pooled_BKdN).unflatten(2, (-1, part.stop - part.start))
            return scores_BKGtN.sum(2) if self.options.get("select") == "group" else scores_BKGtN.flatten(1, 2)

        return attend_to_blocks(call, scores, self.options, width=pooled_BKdN.shape[-1])


class Msa(Kind):
    """Kind `msa`."""

    OPTIONS = frozenset({"mode", "block_size", "topk", "index_dim", "train_gate", "kl_weight"})

    def __init__(self, config: Any, options: dict[str, Any]) -> None:
        super().__init__(config, options)
        self.width = options.get("index_dim") or config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.width, bias=False)
        self.q_norm, self.k_norm = (head_norm(config, self.width) for _ in range(2))
        self.q_index_BKTw: Tensor | None = None

    def prepare(self, x_BTD: Tensor, k_BKTd: Tensor, rotate: Rotate, store: BlockCacheLayer, texts: Texts) -> Tensor:
        """The keys; keeps index queries [B, K, T, w] for the call that follows, and index keys [B, 1, S, w]."""
        self.q_index_BKTw = rotate(self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.width))).transpose(1, 2))
        store.append("index", rotate(self.k_norm(self.k_proj(x_BTD))[:, None]))
        return k_BKTd

    def forward(self, call: Call) -> Tensor:
        if self.options.get("mode") == "warmup":
            return full_attention(call, self.sdpa)
        assert self.q_index_BKTw is not None
        dtype = wide(call.q.dtype)
        block_size = self.options["block_size"]
        q_BKTw = self.q_index_BKTw[call.text.rows, :, -call.q.shape[2] :].detach().to(dtype)
        k_B1Sw = call.store.rows["index"][call.text.rows, :, call.text.first :].detach().to(dtype)
        complete = call.k.shape[2] // block_size
        k_B1wS = k_B1Sw[:, :, : complete * block_size].transpose(2, 3)

        def scores(part: slice) -> Tensor:
            return (q_BKTw[:, :, part] @ k_B1wS).unflatten(-1, (complete, block_size)).amax(-1)

        return attend_to_blocks(call, scores, self.options, width=call.k.shape[2])


KINDS: dict[str, type[Kind]] = {"full": Kind, "window": Window, "moba": Moba, "msa": Msa}
