"""Attention of a model trained by moba_train to all tokens, to windows and to blocks.

- `full`: every token before.
- `window`: the last tokens before, and the first ones of the text (`sinks`).
- `moba`: Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189): the query's own block and the earlier blocks
  whose mean keys fit it best; with `key_conv`, of convolved keys (FlashMoBA, Xiao et al. 2025, arXiv:2511.11571).
- `moba_window`: this, and the blocks of a window before the own one.

Kinds that select by other scores are in `selectors` and `nsa`, kinds with a state in `linear`. A kind is a module with
its own parameters, or without any. Blocks are counted from each text's first token.

Shape suffixes: B texts, T new tokens, t some of them, S all tokens, D hidden size, H query heads, K key/value heads,
d head width, N blocks, b tokens of a block, C selected blocks of a query, J their tokens, X = B * K, x = t * H / K
queries of a key/value head, r some of these.
"""

import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .cache import Kept, Text, Texts, wide
from .options import LAYERS, SHAPE

_SCORES = 2**26
"""Scores in memory at a time."""
_FEW = 16
"""New tokens up to which the keys of each query's blocks are copied."""
_SHORT = 32
"""Tokens of a block below which a prompt's scores are computed for all tokens and masked: blocks are too many to loop
over."""


class Rotary:
    """Rotary embedding by an entry of `ropes`, at the positions [B, T] of the new tokens; angles are formed in
    float64."""

    def __init__(self, frequencies: Callable[[int, torch.device], tuple[Tensor, float]], positions_BT: Tensor) -> None:
        self._frequencies = frequencies
        self._positions_BT = positions_BT
        self._angles = functools.cache(lambda width, device: self._cos_sin(self._positions_BT, width, device))

    def __call__(self, x_BHTd: Tensor) -> Tensor:
        """Rotates [B, heads, T, any even width]."""
        return self._rotate(x_BHTd, *self._angles(x_BHTd.shape[-1], x_BHTd.device))

    def at(self, x_BHNd: Tensor, positions_N: Tensor) -> Tensor:
        """Rotates [B, heads, N, any even width] at positions that all texts share."""
        return self._rotate(x_BHNd, *self._cos_sin(positions_N[None], x_BHNd.shape[-1], x_BHNd.device))

    def _cos_sin(self, positions_BT: Tensor, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        frequencies, scale = self._frequencies(width, device)
        angles_B1Td = (positions_BT.to(device).double()[..., None] * frequencies)[:, None]
        return (scale * angles_B1Td.cos()).float(), (scale * angles_B1Td.sin()).float()

    @staticmethod
    def _rotate(x_BHTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turning, rest = x_BHTd.tensor_split([2 * cos.shape[-1]], -1)
        first, second = turning.to(wide(x_BHTd.dtype)).chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((turned.to(x_BHTd.dtype), rest), -1)


class New(NamedTuple):
    """A layer's tensors of the new tokens before the rotary embedding."""

    x: Tensor
    """The layer's normalised input, [B, T, D]."""
    q: Tensor
    """[B, H, T, d]"""
    k: Tensor
    """[B, K, T, d], as `v`"""
    v: Tensor


class Call(NamedTuple):
    """Attention of some texts' new tokens, the last T of S: without padding."""

    q: Tensor
    """[B, H, T, d]"""
    k: Tensor
    """[B, K, S, d], as `v`"""
    v: Tensor
    text: Text
    store: Kept
    new: New
    rotate: Rotary
    kernels: Any
    """The function that `load_kernels` has found, or None."""
    sink_H: Tensor | None
    """Logits that join the softmax of each head without a value (gpt-oss)."""


def chunk_of(scores_of_a_query: int) -> int:
    """Queries whose scores fit in memory at once."""
    return max(1, _SCORES // max(1, scores_of_a_query))


def masked_attention(
    q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, seen_TS: Tensor | None, sdpa: bool, sink_H: Tensor | None
) -> Tensor:
    """Attention to the keys that a query sees; None: to all of them."""
    if sdpa and sink_H is None:
        return F.scaled_dot_product_attention(q_BHTd, k_BKSd, v_BKSd, seen_TS, enable_gqa=True)
    dtype = wide(q_BHTd.dtype)
    k_BHSd, v_BHSd = (x.repeat_interleave(q_BHTd.shape[1] // x.shape[1], 1).to(dtype) for x in (k_BKSd, v_BKSd))
    scores = q_BHTd.to(dtype) @ k_BHSd.transpose(2, 3) * q_BHTd.shape[-1] ** -0.5
    if seen_TS is not None:
        scores = scores.masked_fill(~seen_TS, -torch.inf)
    return (softmax(scores, sink_H) @ v_BHSd).to(q_BHTd.dtype)


def softmax(scores_BHTS: Tensor, sink_H: Tensor | None) -> Tensor:
    """Softmax of scores and the sink, without the sink's share."""
    if sink_H is None:
        return scores_BHTS.softmax(-1)
    sink_BHT1 = sink_H.to(scores_BHTS.dtype)[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
    return torch.cat([scores_BHTS, sink_BHT1], -1).softmax(-1)[..., :-1]


def _with_sink(out_BHTd: Tensor, lse_BHT: Tensor, sink_H: Tensor) -> Tensor:
    """The output with the sink, whose share of the softmax is what the keys lose."""
    return (out_BHTd * (lse_BHT - sink_H[:, None]).sigmoid()[..., None]).to(out_BHTd.dtype)


@functools.cache
def load_kernels(folder: str) -> Any:
    """Attention by kernels in a model's folder, a package in the layout of Hugging Face's kernels hub; None without.
    A function and not the package, so that models can be copied."""
    package = Path(folder, "kernels", "build", "torch-universal").absolute()
    if not folder or not package.is_dir():
        return None
    name = f"moba_train_kernels_{hashlib.sha256(str(package).encode()).hexdigest()[:8]}"
    init = package / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(package)])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attend_to_blocks


@functools.cache
def _flex(device: str) -> Any:
    return flex_attention if device == "cpu" else torch.compile(flex_attention)


def full_attention(call: Call, implementation: str) -> Tensor:
    """Attention to every token before, [B, H, T, d]."""
    new = call.q.shape[2]
    tokens = call.k.shape[2]
    before = tokens - new
    if implementation == "flex_attention":
        mask = None
        if new > 1:
            shape = (None, None, new, tokens)
            mask = create_block_mask(lambda _b, _h, q, k: k <= q + before, *shape, device=call.q.device)
        flex = functools.partial(_flex(call.q.device.type), block_mask=mask, enable_gqa=True)
        out_BHTd: Tensor
        if call.sink_H is None:
            out_BHTd = flex(call.q, call.k, call.v)
            return out_BHTd
        out_BHTd, lse_BHT = flex(call.q, call.k, call.v, return_lse=True)
        return _with_sink(out_BHTd, lse_BHT, call.sink_H)
    sdpa = implementation == "sdpa" and call.sink_H is None
    if sdpa and new == tokens > 1:
        return F.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True, enable_gqa=True)
    chunk = new if sdpa else chunk_of(call.q.shape[0] * call.q.shape[1] * tokens)
    outs = []
    for begin in range(0, new, chunk):
        q_BHtd = call.q[:, :, begin : begin + chunk]
        end = before + begin + q_BHtd.shape[2]
        seen_tS = None
        if new > 1:
            seen_tS = torch.ones(q_BHtd.shape[2], end, dtype=torch.bool, device=call.q.device).tril(before + begin)
        outs.append(masked_attention(q_BHtd, call.k[:, :, :end], call.v[:, :, :end], seen_tS, sdpa, call.sink_H))
    return torch.cat(outs, 2)


def window_attention(call: Call, window: int, sinks: int, sdpa: bool) -> Tensor:
    """Attention to the last `window` tokens and the first `sinks` ones, [B, H, T, d]."""
    tokens = call.k.shape[2]
    new = call.q.shape[2]
    chunk = max(window, 128)
    outs = []
    for begin in range(0, new, chunk):
        part = slice(begin, min(begin + chunk, new))
        at_t1 = torch.arange(part.start, part.stop, device=call.q.device)[:, None] + tokens - new
        first = max(0, tokens - new + begin - window + 1)
        keys_s = torch.arange(tokens - new + part.stop, device=call.q.device)
        keys_s = torch.cat([keys_s[: min(sinks, first)], keys_s[first:]])
        seen_ts = (keys_s <= at_t1) & ((at_t1 - keys_s < window) | (keys_s < sinks))
        some = call.q[:, :, part], call.k[:, :, keys_s], call.v[:, :, keys_s]
        outs.append(masked_attention(*some, seen_ts, sdpa, call.sink_H))
    return torch.cat(outs, 2)


def best_blocks(scores_BHtN: Tensor, candidates_tN: Tensor, count: int, forced_tN: Tensor | None = None) -> Tensor:
    """Mask, bool [B, H, t, N], of the `count` candidates with the highest scores, never those of score -inf. Forced
    candidates come first; of equal scores, the earlier block."""
    scores = scores_BHtN if forced_tN is None else scores_BHtN.masked_fill(forced_tN, torch.inf)
    values, best_BHtC = scores.masked_fill(~candidates_tN, -torch.inf).sort(dim=-1, descending=True, stable=True)
    chosen_BHtN = torch.zeros_like(scores, dtype=torch.bool)
    return chosen_BHtN.scatter_(-1, best_BHtC[..., :count], values[..., :count] > -torch.inf)


Choose = Callable[[slice, Tensor, Tensor], Tensor]
"""Mask, bool [B, H or K, t, N], of the blocks that new tokens `part` attend to, from their positions [t, 1] and the ids
of all blocks [N]."""


def attend_to_blocks(call: Call, choose: Choose, block_size: int, width: int) -> Tensor:
    """Attention to the blocks that each query chooses, [B, H, T, d]. width: scores that the choice makes of a query and
    head, at most."""
    new = call.q.shape[2]
    tokens = call.k.shape[2]
    attend = _attend_from_many if block_size >= _SHORT else _attend_masked
    if new <= _FEW:
        attend = _attend_from_few
    elif attend is _attend_masked:
        width = tokens
    chunk = chunk_of(call.q.shape[0] * call.q.shape[1] * max(width, block_size))
    ids_N = torch.arange(-(-tokens // block_size), device=call.q.device)
    half_on_gpu = call.q.is_cuda and call.q.dtype in (torch.bfloat16, torch.float16)
    able = half_on_gpu or os.environ.get("TRITON_INTERPRET") == "1"  # the latter for tests
    by_kernels = call.kernels is not None and able and new == tokens > _FEW and not torch.is_grad_enabled()
    outs = []
    for begin in range(0, new, chunk):
        part = slice(begin, min(begin + chunk, new))
        positions_t = torch.arange(part.start, part.stop, device=call.q.device) + tokens - new
        chosen_BHtN = choose(part, positions_t[:, None], ids_N)
        chosen_BHtN = chosen_BHtN.repeat_interleave(call.q.shape[1] // chosen_BHtN.shape[1], 1)
        if by_kernels:
            outs.append(_earlier_ids(chosen_BHtN, positions_t // block_size))
        else:
            outs.append(attend(call._replace(q=call.q[:, :, part]), chosen_BHtN, positions_t, block_size))
    if not by_kernels:
        return torch.cat(outs, 2)
    most = max(ids.shape[-1] for ids in outs)
    selected_BHTC = torch.cat([F.pad(ids, (0, most - ids.shape[-1]), value=-1) for ids in outs], 2)
    found = call.kernels(call.q, call.k, call.v, selected_BHTC, block_size)
    if found is None:  # no kernel takes these tensors
        return attend_to_blocks(call._replace(kernels=None), choose, block_size, width)
    out_BHTd, lse_BHT = found
    return out_BHTd if call.sink_H is None else _with_sink(out_BHTd, lse_BHT, call.sink_H)


def _earlier_ids(chosen_BHtN: Tensor, own_t: Tensor) -> Tensor:
    """Ids of the chosen blocks before the query's own, int32 [B, H, t, C], ascending, -1 behind."""
    none = chosen_BHtN.shape[-1]
    ids_N = torch.arange(none, dtype=torch.int32, device=chosen_BHtN.device)
    earlier_BHtN = chosen_BHtN & (ids_N < own_t[:, None])
    ids_BHtN = torch.where(earlier_BHtN, ids_N, none).sort(-1).values[..., : int(earlier_BHtN.sum(-1).max())]
    return torch.where(ids_BHtN == none, -1, ids_BHtN)


def _attend_from_few(call: Call, chosen_BHtN: Tensor, positions_t: Tensor, block_size: int) -> Tensor:
    """Attention by copies of the keys in each query's blocks: while tokens are generated."""
    batch, kv_heads, tokens, d = call.k.shape
    most = int(chosen_BHtN.sum(-1).max())
    ids_BHtC = chosen_BHtN.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
    tokens_BHtCb = ids_BHtC[..., None] * block_size + torch.arange(block_size, device=call.q.device)
    seen_BHtCb = chosen_BHtN.gather(-1, ids_BHtC)[..., None] & (tokens_BHtCb <= positions_t[:, None, None])
    tokens_BHtJ = tokens_BHtCb.flatten(3).clamp(max=tokens - 1)
    rows = tokens_BHtJ.view(batch, kv_heads, -1, 1).expand(-1, -1, -1, d)
    dtype = wide(call.q.dtype)
    k_BHtJd, v_BHtJd = (x.gather(2, rows).view(*tokens_BHtJ.shape, d).to(dtype) for x in (call.k, call.v))
    scores_BHtJ = (k_BHtJd @ call.q.to(dtype)[..., None]).squeeze(-1) * d**-0.5
    p_BHtJ = softmax(scores_BHtJ.masked_fill(~seen_BHtCb.flatten(3), -torch.inf), call.sink_H)
    return (p_BHtJ[..., None, :] @ v_BHtJd).squeeze(-2).to(call.q.dtype)


def _attend_masked(call: Call, chosen_BHtN: Tensor, positions_t: Tensor, block_size: int) -> Tensor:
    """Attention with a mask of all tokens: from a prompt to short blocks."""
    tokens_S = torch.arange(call.k.shape[2], device=call.q.device)
    seen_BHtS = chosen_BHtN.repeat_interleave(block_size, -1)[..., : len(tokens_S)] & (tokens_S <= positions_t[:, None])
    return masked_attention(call.q, call.k, call.v, seen_BHtS, sdpa=False, sink_H=call.sink_H)


def _attend_from_many(call: Call, chosen_BHtN: Tensor, positions_t: Tensor, block_size: int) -> Tensor:
    """Attention block by block, from the queries that chose it, merged by online softmax: while a prompt is read. Its
    work is that of the chosen blocks."""
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
    if call.sink_H is not None:
        sink_x = call.sink_H.to(dtype).view(call.k.shape[1], -1).repeat_interleave(call.q.shape[2], 1)
        sum_Xx = sum_Xx + (sink_x.repeat(call.q.shape[0], 1) - largest_Xx).exp()
    return (out_Xxd / sum_Xx[..., None]).view_as(call.q).to(call.q.dtype)


_PLAIN: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
"""Values that the model_type of an ordinary model stands for."""


def shape_of(config: Any) -> dict[str, Any]:
    """All of `SHAPE`. Raises ValueError for anything else in the config."""
    own = config.moba.get("model", {})
    if config.model_type not in _PLAIN and config.model_type != "moba_train":
        raise ValueError(f"model_type: {config.model_type!r} given, allowed: moba_train, {', '.join(_PLAIN)}")
    if unknown := sorted(own.keys() - SHAPE.keys()):
        raise ValueError(f"moba.model: {unknown[0]!r} given, allowed: {', '.join(SHAPE)}")
    return SHAPE | _PLAIN.get(config.model_type, {}) | own


class CenteredRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight is added to 1, computed in float32 (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = wide(x.dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, 1 + self.weight.to(dtype), self.eps).to(x.dtype)


def norm_of(config: Any, width: int) -> nn.Module:
    """A norm of the model over vectors of this width."""
    return (CenteredRMSNorm if shape_of(config)["centered_norms"] else nn.RMSNorm)(width, config.rms_norm_eps)


class Kind(nn.Module):
    """Kind of attention of a layer, with its own parameters if it has any. Here: `full`."""

    takes_sink = True
    keeps_state = False
    """True if a state stands for the keys and values of all tokens."""
    decodes_full = True
    """True if new tokens may attend to all tokens, where their layer does not."""
    in_parts = True
    """True if a text that is read in several calls gets the output of one call."""

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__()
        given = {key for key, value in options.items() if value is not None}
        allowed = LAYERS[options["kind"]]
        if unknown := sorted(given - allowed - {"kind"}):
            raise ValueError(f"moba.layers: {options['kind']} has {unknown[0]!r}, allowed: {', '.join(allowed)}")
        self.options = options
        self.implementation: str = config._attn_implementation

    def prepare(self, new: New, rotate: Rotary, store: Kept, texts: Texts) -> Tensor:
        """Keys of the new tokens before the rotary embedding."""
        return new.k

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        """The output [B, H, T, d]. to_all: new tokens do not select; what later calls that do need of them is kept."""
        return full_attention(call, self.implementation)


class Window(Kind):
    """Kind `window`."""

    decodes_full = False

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        sdpa = self.implementation != "eager"
        return window_attention(call, self.options["window"], self.options.get("sinks", 0), sdpa)


class Moba(Kind):
    """Kinds `moba`, and with an option `window` `moba_window`."""

    def __init__(self, config: Any, options: dict[str, Any], layer: int) -> None:
        super().__init__(config, options, layer)
        self.width = options.get("key_conv", 0)
        if self.width:
            self.weight = nn.Parameter(torch.zeros(config.num_key_value_heads * config.head_dim, self.width))

    def prepare(self, new: New, rotate: Rotary, store: Kept, texts: Texts) -> Tensor:
        """k + silu(sum over l < width of weight_l * the key of l tokens before)."""
        if not self.width:
            return new.k
        before = store.get_seq_length()
        k_BKTd = new.k.clone()
        for text in texts:
            k_BKTd[text.rows, :, : max(0, text.first - before)] = 0  # padding is no key of a text
        _, kv_heads, count, d = k_BKTd.shape
        rows_BKsd = F.pad(store.append("keys", k_BKTd), (0, 0, self.width - 1, 0))
        taps = self.weight.T.view(self.width, 1, kv_heads, 1, d)
        ends = range(rows_BKsd.shape[2], rows_BKsd.shape[2] - self.width, -1)
        mixed = sum(tap * rows_BKsd[:, :, end - count : end] for tap, end in zip(taps, ends, strict=True))
        return k_BKTd + F.silu(mixed)

    def forward(self, call: Call, to_all: bool = False) -> Tensor:
        options = self.options
        block_size = options["block_size"]
        if to_all:
            call.store.mean_keys(call, block_size)
            return full_attention(call, self.implementation)
        always = frozenset(options.get("always", []))
        local = 1 + options.get("window", 0) // block_size
        choose = choose_by_means(call, block_size, options["topk"], options.get("select") == "group", always, local)
        return attend_to_blocks(call, choose, block_size, width=call.k.shape[2] // block_size)


KINDS: dict[str, type[Kind]] = {"full": Kind, "window": Window, "moba": Moba, "moba_window": Moba}
"""Kinds of attention by name; other files add theirs."""


def choose_by_means(
    call: Call, block_size: int, topk: int, group: bool, always: frozenset[str], local: int = 1
) -> Choose:
    """MoBA's gate: the last `local` blocks up to the query's own, and `topk` - 1 of those before, first the ones that
    `always` names. group: the heads of a key/value head choose together."""
    dtype = wide(call.q.dtype)
    pooled_BKdN = call.store.mean_keys(call, block_size).to(dtype).transpose(2, 3)
    limits = torch.finfo(dtype)

    def choose(part: slice, positions_t1: Tensor, ids_N: Tensor) -> Tensor:
        q_BKxd = call.q[:, :, part].detach().to(dtype).unflatten(1, (call.k.shape[1], -1)).flatten(2, 3)
        scores_BKGtN = (q_BKxd @ pooled_BKdN).unflatten(2, (-1, len(positions_t1)))
        scores_BHtN = scores_BKGtN.sum(2) if group else scores_BKGtN.flatten(1, 2)
        # A score that overflows stays below forced blocks and above what is no candidate.
        scores_BHtN = F.pad(scores_BHtN.clamp(limits.min, limits.max), (0, len(ids_N) - scores_BHtN.shape[-1]))
        own_t1 = positions_t1 // block_size
        forced = {"current": ids_N == own_t1, "previous": ids_N == own_t1 - 1, "first": ids_N == 0}
        always_tN = functools.reduce(torch.logical_or, (forced[name] for name in {"current", *always}))
        local_tN = (own_t1 - local < ids_N) & (ids_N <= own_t1)
        return best_blocks(scores_BHtN, ids_N <= own_t1 - local, topk - 1, always_tN) | local_tN

    return choose
