"""A model trained by moba_train, for transformers: PyTorch and transformers are all that these two files need.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Llama, Qwen2 and Qwen3 shapes; each layer attends as its entry of `moba.layers` in config.json says, by one of the kinds
in attention_moba_train.py. A prompt is read with each layer's own attention. New tokens, one at a time, attend to every
token before them, as in MoBA's paper, unless `moba_decode` is "own": from_pretrained(..., moba_decode="own"). Several
tokens in one call, as in speculative decoding, always attend as their layer does: it wants "own".

Shape suffixes: B texts, T new tokens, S all tokens, D hidden size, H query heads, K key/value heads, d head width.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .attention_moba_train import KINDS, BlockCacheLayer, Call, Rotate, Text, Texts, full_attention, head_norm, wide

_SHAPES = {"llama": False, "qwen2": True, "qwen3": False}
"""model_type: True if the projections of queries, keys and values have biases."""
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The output's name of the cache, which transformers has changed."""


def texts_by_padding(attention_mask: Tensor | None, batch: int, tokens: int) -> Texts:
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
    kind = rope["rope_type"]
    factor = rope.get("factor", 1.0)
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    frequencies = rope["rope_theta"] ** -exponents
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / factor, 1.0
    trained = rope["original_max_position_embeddings"]
    if kind == "llama3":
        turns = trained * frequencies / (2 * math.pi)
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        ramp = ((high - turns) / (high - low)).clamp(0, 1)
        scale = 1.0
    elif kind == "yarn":

        def index(turns: float) -> float:
            return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

        first = max(math.floor(index(rope.get("beta_fast") or 32)), 0)
        last = min(math.ceil(index(rope.get("beta_slow") or 1)), width - 1)
        indices = torch.arange(width // 2, dtype=torch.float64, device=device)
        ramp = ((indices - first) / max(last - first, 1e-3)).clamp(0, 1)
        scale = 0.1 * math.log(factor) + 1
    else:
        raise ValueError(f"rope_parameters.rope_type: {kind!r} given, allowed: default, linear, llama3, yarn")
    return frequencies * (1 - ramp) + frequencies / factor * ramp, scale


def rotary(config: Any, positions_BT: Tensor) -> Rotate:
    """The rotary embedding at these positions; angles are formed in float64."""

    @functools.cache
    def angles(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        frequencies, scale = rope_frequencies(config, width, device)
        angles_B1Td = (positions_BT.to(device).double()[..., None] * frequencies)[:, None]
        return (scale * angles_B1Td.cos()).float(), (scale * angles_B1Td.sin()).float()

    def rotate(x_BHTd: Tensor) -> Tensor:
        cos, sin = angles(x_BHTd.shape[-1], x_BHTd.device)
        first, second = x_BHTd.to(wide(x_BHTd.dtype)).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BHTd.dtype)

    return rotate


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
        bias = _SHAPES[config.model_type]
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * d, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * d, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * d, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * d, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = head_norm(config, d), head_norm(config, d)
        self.kind = entry["kind"]
        self.add_module(self.kind, KINDS[self.kind](config, entry))

    def forward(self, x_BTD: Tensor, rotate: Rotate, texts: Texts, cache: Any) -> Tensor:
        q_BHTd, k_BKTd, v_BKTd = (
            projection(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        kind: Any = self.get_submodule(self.kind)
        store = BlockCacheLayer() if cache is None else cache.layers[self.layer]
        before = store.get_seq_length()
        q_BHTd = rotate(self.q_norm(q_BHTd))
        k_BKTd = rotate(kind.prepare(x_BTD, self.k_norm(k_BKTd), rotate, store, texts))
        if cache is None:
            k_BKSd, v_BKSd = store.update(k_BKTd, v_BKTd)
        else:
            k_BKSd, v_BKSd = cache.update(k_BKTd, v_BKTd, self.layer)
        decodes_full = self.decodes_full and before > 0 and x_BTD.shape[1] == 1
        out_BHTd = torch.zeros_like(q_BHTd)
        for text in texts:
            new = slice(max(0, text.first - before), None)  # without padding
            keys = k_BKSd[text.rows, :, text.first :], v_BKSd[text.rows, :, text.first :]
            call = Call(q_BHTd[text.rows, :, new], *keys, text, store)
            out_BHTd[text.rows, :, new] = full_attention(call, kind.sdpa) if decodes_full else kind(call)
        return self.o_proj(out_BHTd.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and SwiGLU (Shazeer 2020, arXiv:2002.05202), each behind a norm and added to its input."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        widths = config.hidden_size, config.intermediate_size
        self.mlp = nn.ModuleDict({name: nn.Linear(*widths, bias=False) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = nn.Linear(*widths[::-1], bias=False)

    def forward(self, x_BTD: Tensor, rotate: Rotate, texts: Texts, cache: Any) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotate, texts, cache)
        normed = self.post_attention_layernorm(x_BTD)
        hidden = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return x_BTD + self.mlp["down_proj"](hidden)


class MobaForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model."""

    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        decode = getattr(config, "moba_decode", "full")
        entries = config.moba["layers"]
        if decode not in ("full", "own"):
            raise ValueError(f"moba_decode: {decode!r} given, allowed: full, own")
        if config.model_type not in _SHAPES:
            raise ValueError(f"model_type: {config.model_type!r} given, allowed: {', '.join(_SHAPES)}")
        if len(entries) != config.num_hidden_layers:
            raise ValueError(f"moba.layers: {len(entries)} given, {config.num_hidden_layers} needed")
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Block(config, layer) for layer in range(len(entries))),
                "norm": nn.RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss if there are labels. `past_key_values` is the older name of `cache`.

        Raises ValueError for a cache that is no DynamicCache, padding between tokens, and arguments that are not
        supported, such as output_attentions.
        """
        for name, value in others.items():
            if name not in ("return_dict", "cache_position") and value is not None and value is not False:
                raise ValueError(f"{name}: given, but this model does not support it")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: exactly one of the two needed")
        x_BTD = self.model["embed_tokens"](input_ids) if inputs_embeds is None else inputs_embeds
        batch, new = x_BTD.shape[:2]
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            cache = DynamicCache()
        before = 0
        if cache is not None:
            before = block_cache(cache, self.config.num_hidden_layers).get_seq_length()
        texts = texts_by_padding(attention_mask, batch, before + new)
        if position_ids is None:
            position_ids = torch.arange(before, before + new, device=x_BTD.device).repeat(batch, 1)
            for text in texts:
                position_ids[text.rows] -= text.first
        elif attention_mask is None and (position_ids.diff() < 1).any():
            raise ValueError("position_ids: begin again inside of a row; several texts in one row are not supported")
        rotate = rotary(self.config, position_ids)
        for block in self.model["layers"]:
            x_BTD = block(x_BTD, rotate, texts, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(self.model["norm"](x_BTD[:, kept]))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: cache})
