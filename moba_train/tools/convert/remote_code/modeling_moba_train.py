"""A model trained by moba_train, for transformers: PyTorch and transformers are all that this file needs.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Llama, Qwen2 and Qwen3 shapes. Each layer attends as its entry of `moba.layers` in config.json says:

- `full`: every token before.
- `window`: the last tokens before, and the first ones of the text (`sinks`).
- `moba`: Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189): a query's own block, and the earlier blocks whose
  mean key fits it best; with `key_conv`, on convolved keys (FlashMoBA, Xiao et al. 2025, arXiv:2511.11571).
- `msa`: MiniMax Sparse Attention (arXiv:2606.13392): the blocks of which one token fits best, by an index branch.

A prompt is read with each layer's own attention. New tokens, one at a time, attend to every token before them, as in
MoBA's paper, unless `moba_decode` is "own": from_pretrained(..., moba_decode="own"). Several tokens in one call, which
speculative decoding makes, always attend as their layer does: set "own" with it.

Shape suffixes: B texts, T new tokens, S all tokens, t a chunk of the new ones, D hidden size, H query heads, K key/value
heads, G = H / K, d head width, N blocks, b tokens of a block, X = B * K, x = G * t queries of a key/value head, r some
of these, C selected blocks, J their tokens.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

_SHAPES = {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
"""model_type: (queries, keys and values have biases, queries and keys are normalised)."""
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
_SCORES = 2**26
"""Scores in memory at a time."""
_FEW = 16
"""New tokens up to which the keys of each query's blocks are copied."""
_KEPT = 256
"""Keys kept of before their convolution, that a cache can be cut by about as many tokens (speculative decoding)."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax and sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Text(NamedTuple):
    """Texts with as much padding before them: `texts`[i] begins at token `first`."""

    texts: slice | list[int]
    first: int


def texts_by_padding(attention_mask: Tensor | None, batch: int, tokens: int) -> list[Text]:
    """The texts of a batch. Padding behind a text changes nothing before it and is not looked at.

    Raises ValueError for a mask of another shape than [B, S], and for padding inside of a text.
    """
    if attention_mask is None:
        return [Text(slice(None), 0)]
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != (batch, tokens):
        shape = getattr(attention_mask, "shape", type(attention_mask).__name__)
        raise ValueError(f"attention_mask: {shape} given, [batch, all tokens] = [{batch}, {tokens}] needed")
    mask = attention_mask.bool()
    firsts = (mask.cumsum(1) == 0).sum(1) % tokens  # 0 for a text that is all padding
    if ((mask[:, 1:] & ~mask[:, :-1]).sum(1) > (firsts > 0)).any():
        raise ValueError("attention_mask: has padding between tokens; pad prompts on the left")
    found: dict[int, list[int]] = {}
    for text, first in enumerate(firsts.tolist()):
        found.setdefault(first, []).append(text)
    return [Text(texts if len(found) > 1 else slice(None), first) for first, texts in found.items()]


class BlockCacheLayer(DynamicLayer):
    """Keys and values of a layer, and what its kind of attention keeps. Cut and reordered as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled: Tensor | None = None
        """Mean key of each text's complete blocks, [B, K, N, d], counted from the text's first token."""
        self.rows: dict[str, Tensor] = {}
        """Other rows of tokens, [B, heads, at most S, width], by name."""

    def append(self, name: str, new: Tensor, keep: int | None = None) -> Tensor:
        """The kept rows of all tokens and the new ones; of these, the last `keep` are kept (None: all)."""
        rows = torch.cat([self.rows[name], new], 2) if name in self.rows else new
        self.rows[name] = rows if keep is None else rows[:, :, -keep:]
        return rows

    def mean_keys(self, k_BKSd: Tensor, texts: slice | list[int], new: int, block_size: int) -> Tensor:
        """Mean keys of complete blocks, [B, K, N, d]; those that the `new` last tokens complete are computed."""
        tokens = k_BKSd.shape[2]
        done, complete = (tokens - new) // block_size, tokens // block_size
        missing = complete - (0 if self.pooled is None else self.pooled.shape[2])
        if missing > 0:
            empty = self.keys.new_zeros(self.keys.shape[0], self.keys.shape[1], missing, self.keys.shape[3])
            self.pooled = empty if self.pooled is None else torch.cat([self.pooled, empty], 2)
        if self.pooled is None:
            return k_BKSd[:, :, :0]
        if complete > done:
            blocks = k_BKSd[:, :, done * block_size : complete * block_size].detach()
            means = blocks.unflatten(2, (complete - done, block_size)).to(wide(blocks.dtype)).mean(3)
            self.pooled[texts, :, done:complete] = means.to(blocks.dtype)
        return self.pooled[texts, :, :complete]

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rows = {name: change(rows) for name, rows in self.rows.items()}
        self.pooled = None if self.pooled is None else change(self.pooled)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._each(lambda x: x[indices])

    def crop(self, *arguments: Any) -> None:
        before = self.get_seq_length()
        super().crop(*arguments)
        # Mean keys of blocks that are no longer complete are computed again when they are.
        left = self.get_seq_length() - before
        self.rows = {name: rows[:, :, :left] if left else rows for name, rows in self.rows.items()}

    def reset(self) -> None:
        super().reset()
        self.pooled = None
        self.rows = {}


def block_cache(cache: Any, layers: int) -> Any:
    """The cache, with layers that keep what the attention kinds need. Raises ValueError for another than a
    DynamicCache."""
    if type(cache) is DynamicCache and cache.get_seq_length() == 0:
        cache.layers = [BlockCacheLayer() for _ in range(layers)]
    if not all(isinstance(layer, BlockCacheLayer) for layer in cache.layers):
        raise ValueError(f"cache: {type(cache).__name__} given, allowed: a DynamicCache that this model has filled")
    return cache


def rope_frequencies(config: Any, width: int, device: torch.device) -> tuple[Tensor, float]:
    """Angles per position, float64 [d / 2], and the factor on cos and sin, by `rope_parameters` of the config."""
    rope = config.rope_parameters
    kind, factor = rope["rope_type"], rope.get("factor", 1.0)
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    frequencies = rope["rope_theta"] ** -exponents
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / factor, 1.0
    trained = rope["original_max_position_embeddings"]
    if kind == "llama3":
        turns = trained * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        ramp, scale = ((high - turns) / (high - low)).clamp(0, 1), 1.0
    elif kind == "yarn":

        def index(turns: float) -> float:
            return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

        first = max(math.floor(index(rope.get("beta_fast") or 32)), 0)
        last = min(math.ceil(index(rope.get("beta_slow") or 1)), width - 1)
        indices = torch.arange(width // 2, dtype=torch.float64, device=device)
        ramp, scale = ((indices - first) / max(last - first, 1e-3)).clamp(0, 1), 0.1 * math.log(factor) + 1
    else:
        raise ValueError(f"rope_parameters.rope_type: {kind!r} given, allowed: default, linear, llama3, yarn")
    return frequencies * (1 - ramp) + frequencies / factor * ramp, scale


class Rotary:
    """Rotary embedding at given positions, [B, T], of heads of any even width."""

    def __init__(self, config: Any, positions_BT: Tensor) -> None:
        self.config = config
        self.positions = positions_BT
        self.angles: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x_BHTd: Tensor) -> Tensor:
        """The two halves of each head rotated, in float32 at least. Angles are formed in float64."""
        width = x_BHTd.shape[-1]
        if width not in self.angles:
            frequencies, scale = rope_frequencies(self.config, width, x_BHTd.device)
            angles_B1Td = (self.positions.double()[..., None] * frequencies)[:, None]
            self.angles[width] = (scale * angles_B1Td.cos()).float(), (scale * angles_B1Td.sin()).float()
        cos, sin = self.angles[width]
        first, second = x_BHTd.to(wide(x_BHTd.dtype)).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BHTd.dtype)


def masked_attention(
    q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, seen_TS: Tensor | None, sdpa: bool = True
) -> Tensor:
    """Attention to the keys that a query sees; all of them with None."""
    if sdpa:
        return F.scaled_dot_product_attention(q_BHTd, k_BKSd, v_BKSd, seen_TS, enable_gqa=True)
    dtype = wide(q_BHTd.dtype)
    group = q_BHTd.shape[1] // k_BKSd.shape[1]
    k_BHSd, v_BHSd = (x.repeat_interleave(group, 1).to(dtype) for x in (k_BKSd, v_BKSd))
    scores = q_BHTd.to(dtype) @ k_BHSd.transpose(2, 3) * q_BHTd.shape[-1] ** -0.5
    if seen_TS is not None:
        scores = scores.masked_fill(~seen_TS, -torch.inf)
    return (scores.softmax(-1) @ v_BHSd).to(q_BHTd.dtype)


def full_attention(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, sdpa: bool) -> Tensor:
    """Causal attention; the queries are the last T of the S tokens."""
    new, tokens = q_BHTd.shape[2], k_BKSd.shape[2]
    if sdpa and new == tokens > 1:
        return F.scaled_dot_product_attention(q_BHTd, k_BKSd, v_BKSd, is_causal=True, enable_gqa=True)
    seen_TS = None
    if new > 1:
        seen_TS = torch.ones(new, tokens, dtype=torch.bool, device=q_BHTd.device).tril(tokens - new)
    return masked_attention(q_BHTd, k_BKSd, v_BKSd, seen_TS, sdpa)


def best_blocks(scores_BHtN: Tensor, own_t1: Tensor, history: int, always: tuple[str, ...] = ()) -> Tensor:
    """Mask, bool [B, H, t, N] of each query's own block and the `history` earlier ones with the highest scores. Of equal
    scores the earlier block wins; what `always` names counts among them and comes first."""
    blocks = scores_BHtN.shape[-1]
    ids_N = torch.arange(blocks, device=scores_BHtN.device)
    forced_tN = torch.zeros_like(ids_N < own_t1)
    if "previous" in always:
        forced_tN |= ids_N == own_t1 - 1
    if "first" in always:
        forced_tN |= ids_N == 0
    limits = torch.finfo(scores_BHtN.dtype)
    scores = scores_BHtN.clamp(limits.min, limits.max).masked_fill(forced_tN, torch.inf)
    scores = scores.masked_fill(ids_N >= own_t1, -torch.inf)
    best_BHtC = scores.sort(dim=-1, descending=True, stable=True).indices[..., :history]
    chosen_BHtN = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best_BHtC, True)
    return chosen_BHtN & (ids_N < own_t1) | (ids_N == own_t1)


def attend_to_blocks(
    q_BHTd: Tensor,
    k_BKSd: Tensor,
    v_BKSd: Tensor,
    scores: Callable[[slice], Tensor],
    options: dict[str, Any],
    width: int,
) -> Tensor:
    """Causal attention of the last T of S tokens to the blocks with the best `scores`, [B, H or K, t, at most N] of some
    of the queries. `width`: scores of a query and head that exist at a time."""
    block_size, new, tokens = options["block_size"], q_BHTd.shape[2], k_BKSd.shape[2]
    blocks = -(-tokens // block_size)
    chunk = max(1, _SCORES // (q_BHTd.shape[0] * q_BHTd.shape[1] * max(width, block_size)))
    attend = _attend_from_few if new <= _FEW else _attend_from_many
    out_BHTd = torch.empty_like(q_BHTd)
    for begin in range(0, new, chunk):
        part = slice(begin, min(begin + chunk, new))
        positions_t = torch.arange(part.start, part.stop, device=q_BHTd.device) + tokens - new
        scores_BHtN = scores(part)
        scores_BHtN = F.pad(scores_BHtN, (0, blocks - scores_BHtN.shape[-1]))
        own_t1 = (positions_t // block_size)[:, None]
        chosen_BHtN = best_blocks(scores_BHtN, own_t1, options["topk"] - 1, tuple(options.get("always", ())))
        chosen_BHtN = chosen_BHtN.repeat_interleave(q_BHTd.shape[1] // chosen_BHtN.shape[1], 1)
        out_BHTd[:, :, part] = attend(q_BHTd[:, :, part], k_BKSd, v_BKSd, chosen_BHtN, positions_t, options)
    return out_BHTd


def _attend_from_few(
    q_BHtd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, chosen_BHtN: Tensor, positions_t: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention by copies of the keys in each query's blocks: while tokens are generated."""
    block_size, topk = options["block_size"], options["topk"]
    batch, kv_heads, tokens, d = k_BKSd.shape
    ids_BHtC = chosen_BHtN.int().argsort(dim=-1, descending=True, stable=True)[..., :topk]
    in_block = torch.arange(block_size, device=q_BHtd.device)
    tokens_BHtJ = (ids_BHtC[..., None] * block_size + in_block).flatten(3)
    seen_BHtJ = chosen_BHtN.gather(-1, ids_BHtC).repeat_interleave(block_size, -1)
    seen_BHtJ &= tokens_BHtJ <= positions_t[:, None]
    rows = tokens_BHtJ.clamp(max=tokens - 1).view(batch, kv_heads, -1, 1).expand(-1, -1, -1, d)
    dtype = wide(q_BHtd.dtype)
    k_BHtJd, v_BHtJd = (x.gather(2, rows).view(*tokens_BHtJ.shape, d).to(dtype) for x in (k_BKSd, v_BKSd))
    scores_BHtJ = (k_BHtJd @ q_BHtd.to(dtype)[..., None]).squeeze(-1) * d**-0.5
    p_BHtJ = scores_BHtJ.masked_fill(~seen_BHtJ, -torch.inf).softmax(-1)
    return (p_BHtJ[..., None, :] @ v_BHtJd).squeeze(-2).to(q_BHtd.dtype)


def _attend_from_many(
    q_BHtd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, chosen_BHtN: Tensor, positions_t: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention block by block, from the queries that chose it, merged by online softmax: while a prompt is read. Its
    work is that of the chosen blocks."""
    block_size, tokens, d = options["block_size"], k_BKSd.shape[2], q_BHtd.shape[-1]
    group = q_BHtd.shape[1] // k_BKSd.shape[1]
    dtype = wide(q_BHtd.dtype)
    k_XSd, v_XSd = k_BKSd.flatten(0, 1), v_BKSd.flatten(0, 1)
    q_Xxd = q_BHtd.reshape(len(k_XSd), -1, d).to(dtype) * d**-0.5
    chosen_NXx = chosen_BHtN.reshape(len(k_XSd), -1, chosen_BHtN.shape[-1]).permute(2, 0, 1)
    positions_x = positions_t.repeat(group)
    # The largest score so far, not -inf: differences stay numbers.
    largest_Xx = torch.full_like(q_Xxd[..., 0], torch.finfo(dtype).min)
    sum_Xx = torch.zeros_like(largest_Xx)
    out_Xxd = torch.zeros_like(q_Xxd)
    most_N = chosen_NXx.sum(-1).amax(-1).tolist()
    for block, most in enumerate(most_N):
        if most == 0:
            continue
        # The queries that chose the block come first; heads that have fewer of them get others, which see nothing.
        rows_Xr = chosen_NXx[block].int().argsort(dim=1, descending=True, stable=True)[:, :most]
        rows_Xrd = rows_Xr[..., None].expand(-1, -1, d)
        keys = slice(block * block_size, min((block + 1) * block_size, tokens))
        key_positions = torch.arange(keys.start, keys.stop, device=q_BHtd.device)
        seen_Xrb = chosen_NXx[block].gather(1, rows_Xr)[..., None] & (key_positions <= positions_x[rows_Xr][..., None])
        scores_Xrb = q_Xxd.gather(1, rows_Xrd) @ k_XSd[:, keys].to(dtype).transpose(1, 2)
        scores_Xrb = scores_Xrb.masked_fill(~seen_Xrb, -torch.inf)
        before_Xr = largest_Xx.gather(1, rows_Xr)
        after_Xr = torch.maximum(before_Xr, scores_Xrb.amax(-1))
        p_Xrb = (scores_Xrb - after_Xr[..., None]).exp()
        keep_Xr = (before_Xr - after_Xr).exp()
        out_Xrd = out_Xxd.gather(1, rows_Xrd) * keep_Xr[..., None] + p_Xrb @ v_XSd[:, keys].to(dtype)
        out_Xxd = out_Xxd.scatter(1, rows_Xrd, out_Xrd)
        sum_Xx = sum_Xx.scatter(1, rows_Xr, sum_Xx.gather(1, rows_Xr) * keep_Xr + p_Xrb.sum(-1))
        largest_Xx = largest_Xx.scatter(1, rows_Xr, after_Xr)
    return (out_Xxd / sum_Xx[..., None]).view_as(q_BHtd).to(q_BHtd.dtype)


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

    def keys(self, k_BKTd: Tensor, store: BlockCacheLayer, texts: list[Text]) -> Tensor:
        """Keys of the new tokens before the rotary embedding, as the kind wants them."""
        return k_BKTd

    def look(self, x_BTD: Tensor, rotary: Rotary, store: BlockCacheLayer) -> None:
        """Takes what the kind needs of the layer's normalised input."""

    def forward(self, q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, store: BlockCacheLayer, text: Text) -> Tensor:
        """The output of the last T of S tokens; k, v: without padding."""
        return full_attention(q_BHTd, k_BKSd, v_BKSd, self.sdpa)


class Window(Kind):
    """Kind `window`."""

    OPTIONS = frozenset({"window", "sinks"})

    def forward(self, q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, store: BlockCacheLayer, text: Text) -> Tensor:
        window, sinks = self.options["window"], self.options.get("sinks", 0)
        tokens, new = k_BKSd.shape[2], q_BHTd.shape[2]
        out_BHTd = torch.empty_like(q_BHTd)
        for begin in range(0, new, max(window, 128)):
            part = slice(begin, min(begin + max(window, 128), new))
            at_t1 = torch.arange(part.start, part.stop, device=q_BHTd.device)[:, None] + tokens - new
            first = max(0, tokens - new + part.start - window + 1)
            near = torch.arange(first, tokens - new + part.stop, device=q_BHTd.device)
            seen = torch.cat([torch.arange(min(sinks, first), device=q_BHTd.device), near])
            seen_ts = (seen <= at_t1) & ((at_t1 - seen < window) | (seen < sinks))
            keys = k_BKSd[:, :, seen], v_BKSd[:, :, seen]
            out_BHTd[:, :, part] = masked_attention(q_BHTd[:, :, part], *keys, seen_ts, self.sdpa)
        return out_BHTd


class Moba(Kind):
    """Kind `moba`."""

    OPTIONS = frozenset({"block_size", "topk", "select", "always", "key_conv"})

    def __init__(self, config: Any, options: dict[str, Any]) -> None:
        super().__init__(config, options)
        self.width = options.get("key_conv", 0)
        if self.width:
            self.weight = nn.Parameter(torch.zeros(config.num_key_value_heads * config.head_dim, self.width))

    def keys(self, k_BKTd: Tensor, store: BlockCacheLayer, texts: list[Text]) -> Tensor:
        """k + silu(sum over l < width of weight_l * the key of l tokens before)."""
        if not self.width:
            return k_BKTd
        before = store.get_seq_length()
        k_BKTd = k_BKTd.clone()
        for text in texts:
            k_BKTd[text.texts, :, : max(0, text.first - before)] = 0  # padding is no key of a text
        earlier = store.rows["keys"].shape[2] if "keys" in store.rows else 0
        if earlier < min(before, self.width - 1):
            raise ValueError(f"cache: was cut by more than {_KEPT - self.width} tokens, which key_conv cannot follow")
        all_BKsd = F.pad(store.append("keys", k_BKTd, _KEPT), (0, 0, self.width - 1, 0))
        _, kv_heads, new, d = k_BKTd.shape
        taps = self.weight.T.view(self.width, 1, kv_heads, 1, d)
        ends = range(all_BKsd.shape[2], all_BKsd.shape[2] - self.width, -1)
        mixed = sum(tap * all_BKsd[:, :, end - new : end] for tap, end in zip(taps, ends, strict=True))
        return k_BKTd + F.silu(mixed)

    def forward(self, q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, store: BlockCacheLayer, text: Text) -> Tensor:
        block_size = self.options["block_size"]
        pooled_BKNd = store.mean_keys(k_BKSd, text.texts, q_BHTd.shape[2], block_size)
        group = q_BHTd.shape[1] // k_BKSd.shape[1]
        dtype = wide(q_BHTd.dtype)

        def scores(part: slice) -> Tensor:
            q_BKxd = q_BHTd[:, :, part].detach().to(dtype).unflatten(1, (-1, group)).flatten(2, 3)
            scores_BKGtN = (q_BKxd @ pooled_BKNd.to(dtype).transpose(2, 3)).unflatten(2, (group, -1))
            return scores_BKGtN.sum(2) if self.options.get("select") == "group" else scores_BKGtN.flatten(1, 2)

        width = -(-k_BKSd.shape[2] // block_size)
        return attend_to_blocks(q_BHTd, k_BKSd, v_BKSd, scores, self.options, width)


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

    def look(self, x_BTD: Tensor, rotary: Rotary, store: BlockCacheLayer) -> None:
        """Index queries [B, K, T, w], for the call that follows, and index keys [B, 1, S, w]."""
        self.q_index_BKTw = rotary(self.q_norm(self.q_proj(x_BTD).unflatten(-1, (-1, self.width))).transpose(1, 2))
        store.append("index", rotary(self.k_norm(self.k_proj(x_BTD))[:, None]))

    def forward(self, q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, store: BlockCacheLayer, text: Text) -> Tensor:
        if self.options.get("mode") == "warmup":
            return full_attention(q_BHTd, k_BKSd, v_BKSd, self.sdpa)
        assert self.q_index_BKTw is not None
        dtype = wide(q_BHTd.dtype)
        block_size = self.options["block_size"]
        q_BKTw = self.q_index_BKTw[text.texts, :, -q_BHTd.shape[2] :].detach().to(dtype)
        k_B1Sw = store.rows["index"][text.texts, :, text.first :].detach().to(dtype)
        complete = k_BKSd.shape[2] // block_size
        k_B1Ws = k_B1Sw[:, :, : complete * block_size].transpose(2, 3)

        def scores(part: slice) -> Tensor:
            return (q_BKTw[:, :, part] @ k_B1Ws).unflatten(-1, (complete, block_size)).amax(-1)

        return attend_to_blocks(q_BHTd, k_BKSd, v_BKSd, scores, self.options, k_BKSd.shape[2])


KINDS: dict[str, type[Kind]] = {"full": Kind, "window": Window, "moba": Moba, "msa": Msa}


def head_norm(config: Any, width: int) -> nn.Module:
    """RMSNorm of queries and keys, in models that have it."""
    return nn.RMSNorm(width, config.rms_norm_eps) if _SHAPES[config.model_type][1] else nn.Identity()


class Attention(nn.Module):
    """Grouped-query attention of the layer's kind, whose parameters have its name."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        entry = config.moba["layers"][layer]
        if entry.get("kind") not in KINDS:
            raise ValueError(f"moba.layers[{layer}].kind: {entry.get('kind')!r} given, allowed: {', '.join(KINDS)}")
        self.layer = layer
        self.head_dim = d = config.head_dim
        self.decodes_full = getattr(config, "moba_decode", "full") == "full"
        bias = _SHAPES[config.model_type][0]
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * d, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * d, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * d, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * d, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = head_norm(config, d), head_norm(config, d)
        self.kind = entry["kind"]
        self.add_module(self.kind, KINDS[self.kind](config, entry))

    def forward(self, x_BTD: Tensor, rotary: Rotary, texts: list[Text], cache: Any) -> Tensor:
        q_BHTd, k_BKTd, v_BKTd = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        kind: Any = self.get_submodule(self.kind)
        store = BlockCacheLayer() if cache is None else cache.layers[self.layer]
        before = store.get_seq_length()
        kind.look(x_BTD, rotary, store)
        q_BHTd = rotary(self.q_norm(q_BHTd))
        k_BKTd = rotary(kind.keys(self.k_norm(k_BKTd), store, texts))
        if cache is None:
            k_BKSd, v_BKSd = store.update(k_BKTd, v_BKTd)
        else:
            k_BKSd, v_BKSd = cache.update(k_BKTd, v_BKTd, self.layer)
        decodes_full = self.decodes_full and before > 0 and x_BTD.shape[1] == 1
        out_BHTd = torch.zeros_like(q_BHTd)
        for text in texts:
            new = slice(max(0, text.first - before), None)  # without padding
            q = q_BHTd[text.texts, :, new]
            k, v = k_BKSd[text.texts, :, text.first :], v_BKSd[text.texts, :, text.first :]
            attended = full_attention(q, k, v, kind.sdpa) if decodes_full else kind(q, k, v, store, text)
            out_BHTd[text.texts, :, new] = attended
        return self.o_proj(out_BHTd.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, rotary: Rotary, texts: list[Text], cache: Any) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary, texts, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class MobaPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of the model."""

    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _supports_sdpa = True


class MobaModel(MobaPreTrainedModel):
    """The model without its output projection."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        decode = getattr(config, "moba_decode", "full")
        if decode not in ("full", "own"):
            raise ValueError(f"moba_decode: {decode!r} given, allowed: full, own")
        if config.model_type not in _SHAPES:
            raise ValueError(f"model_type: {config.model_type!r} given, allowed: {', '.join(_SHAPES)}")
        if len(config.moba["layers"]) != config.num_hidden_layers:
            raise ValueError(f"moba.layers: {len(config.moba['layers'])} given, {config.num_hidden_layers} needed")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: exactly one of the two needed")
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = DynamicCache()
        cache = None if cache is None else block_cache(cache, len(self.layers))
        batch, new = x_BTD.shape[:2]
        before = 0 if cache is None else cache.get_seq_length()
        texts = texts_by_padding(attention_mask, batch, before + new)
        if position_ids is None:
            position_ids = torch.arange(before, before + new, device=x_BTD.device).repeat(batch, 1)
            for text in texts:
                position_ids[text.texts] -= text.first
        elif attention_mask is None and (position_ids.diff() < 1).any():
            raise ValueError("position_ids: begin again inside of a row; several texts in one row are not supported")
        rotary = Rotary(self.config, position_ids)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary, texts, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BTD), **{_CACHE: cache})


class MobaForCausalLM(MobaPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MobaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache_position: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss if there are labels. `past_key_values` is what transformers called `cache` before.

        Raises ValueError for another cache than a DynamicCache, padding between tokens, and arguments that are not
        supported, such as output_attentions.
        """
        refused = [name for name, value in others.items() if value is not None and value is not False]
        if refused:
            raise ValueError(f"{refused[0]}: given, but this model does not support it")
        cache = past_key_values if cache is None else cache
        inputs = input_ids, attention_mask, position_ids, inputs_embeds, cache, use_cache
        found = self.model(*inputs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: found[_CACHE] if _CACHE in found else None})
