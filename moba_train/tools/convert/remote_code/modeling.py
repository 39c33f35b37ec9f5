"""A model trained by moba_train, for transformers: PyTorch and transformers are all that this needs.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Each layer attends as its entry of `moba.layers` in config.json says, by one of the kinds in the sections `attention`,
`selectors`, `nsa`, `linear` and `groups`. The rest of the model is that of its `model_type`, if this is Llama's,
Qwen2's or Qwen3's, or else in `moba.model` and `moba.ropes`. A prompt is read with each layer's own attention. New
tokens, one at a time, attend to every token before them, as in MoBA's paper, unless `moba_decode` is "own":
from_pretrained(..., moba_decode="own"). Several tokens in one call always attend as their layer does, so speculative
decoding needs "own". Layers with a window or a state and those of `seer` know one way only.

The folder kernels/ next to config.json holds Triton kernels for prompts in bfloat16 and float16 on CUDA. It may be left
out: everything is computed in plain PyTorch then.

Shape suffixes: B texts, T new tokens, S all tokens, D hidden size, H query heads, K key/value heads, d head width.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationMixin,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from . import groups, linear, nsa, selectors  # noqa: F401  # each adds its kinds to KINDS
from .attention import KINDS, Call, New, Rotary, load_kernels, norm_of, shape_of
from .cache import BlockCacheLayer, Kept, StaticBlockCacheLayer, Text, Texts
from .experts import MixtureOfExperts
from .options import ROPE, ROPES

_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The output's name of the cache, which transformers has changed."""


class MobaConfig(PretrainedConfig):
    """Config of models that no architecture of transformers computes."""

    model_type = "moba_train"


def texts_by_padding(attention_mask: Tensor | None, batch: int, tokens: int) -> Texts:
    """The texts of a batch. Padding behind a text changes nothing before it, except in `seer`, and is not looked at.

    Raises ValueError for a mask of another shape than [B, S], and for padding inside of a text.
    """
    if attention_mask is None:
        return [Text(slice(None), 0)]
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != (batch, tokens):
        shape = getattr(attention_mask, "shape", type(attention_mask).__name__)
        raise ValueError(f"attention_mask: {shape} given, [batch, all tokens] = [{batch}, {tokens}] needed")
    mask = attention_mask.bool()
    firsts = (mask.cumsum(1) == 0).sum(1)  # `tokens` for a text that is all padding, so far
    if ((mask[:, 1:] & ~mask[:, :-1]).sum(1) > (firsts > 0)).any():
        raise ValueError("attention_mask: has padding between tokens; pad prompts on the left")
    found: dict[int, list[int]] = {}
    for text, first in enumerate(firsts.tolist()):
        found.setdefault(first, []).append(text)
    return [Text(texts if len(found) > 1 else slice(None), first) for first, texts in found.items()]


def block_cache(cache: Any, layers: int) -> Any:
    """The cache, with layers that keep what the attention kinds need. Raises ValueError for another than an ordinary
    DynamicCache or StaticCache."""
    if type(cache) is DynamicCache and cache.get_seq_length() == 0:
        cache.layers = [BlockCacheLayer() for _ in range(layers)]
    if type(cache) is StaticCache and not cache.offloading and cache.get_seq_length() == 0:
        # All with room for all tokens, whatever windows the config has.
        layers_of_cache: Any = cache.layers
        most = max(layer.max_cache_len for layer in layers_of_cache)
        cache.layers = [StaticBlockCacheLayer(most) for _ in range(layers)]
    if not all(isinstance(layer, Kept) for layer in cache.layers):
        raise ValueError(
            f"cache: {type(cache).__name__} given, allowed: a DynamicCache or StaticCache that this model has filled"
        )
    return cache


def rope_of(config: Any, layer: int) -> dict[str, Any]:
    """The layer's entry of `moba.ropes`, or what the config of an ordinary model says in its words."""
    if "ropes" in config.moba:
        found: dict[str, Any] = config.moba["ropes"][layer]
        if unknown := sorted(found.keys() - ROPE):
            raise ValueError(f"moba.ropes[{layer}]: {unknown[0]!r} given, allowed: {', '.join(sorted(ROPE))}")
        return found
    rope = config.rope_parameters
    kind = rope["rope_type"]
    names = ("high_freq_factor", "low_freq_factor") if kind == "llama3" else ("beta_fast", "beta_slow")
    return {
        "kind": {"default": "none", "linear": "pi"}.get(kind, kind),
        "theta": rope["rope_theta"],
        "factor": rope.get("factor", 1.0),
        "original_seq_len": rope.get("original_max_position_embeddings"),
        "beta_fast": rope.get(names[0]) or 32,
        "beta_slow": rope.get(names[1]) or 1,
        "truncate": rope.get("truncate", True),
    }


def rope_frequencies(rope: dict[str, Any], width: int, device: torch.device) -> tuple[Tensor, float]:
    """Angles per position, float64 [c / 2] of the first c dimensions, which turn, and the factor on cos and sin."""
    kind = rope["kind"]
    if kind not in ROPES:
        raise ValueError(f"rope: {kind!r} given, allowed: {', '.join(ROPES)}")
    factor = rope["factor"]
    width = int(width * rope.get("fraction", 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    frequencies = rope["theta"] ** -exponents
    if kind in ("none", "abf", "nope"):
        return frequencies * (kind != "nope"), 1.0
    if kind == "pi":
        return frequencies / factor, 1.0
    trained = rope["original_seq_len"]
    fast, slow = rope["beta_fast"], rope["beta_slow"]
    scale = 1.0
    if kind == "llama3":
        turns = trained * frequencies / (2 * math.pi)
        ramp = ((fast - turns) / (fast - slow)).clamp(0, 1)
    else:

        def index(turns: float) -> float:
            return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope["theta"]))

        whole = rope.get("truncate", True)
        first = max(math.floor(index(fast)) if whole else index(fast), 0)
        last = min(math.ceil(index(slow)) if whole else index(slow), width - 1)
        indices = torch.arange(width // 2, dtype=torch.float64, device=device)
        ramp = ((indices - first) / max(last - first, 1e-3)).clamp(0, 1)
        scale = 0.1 * math.log(factor) + 1
    return frequencies * (1 - ramp) + frequencies / factor * ramp, scale


class Attention(nn.Module):
    """Grouped-query attention of the layer's kind, whose parameters have its name."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        shape = shape_of(config)
        entry = config.moba["layers"][layer]
        if entry.get("kind") not in KINDS:
            raise ValueError(f"moba.layers[{layer}].kind: {entry.get('kind')!r} given, allowed: {', '.join(KINDS)}")
        self.layer = layer
        self.head_dim = d = config.head_dim
        self.decodes_full = getattr(config, "moba_decode", "full") == "full"
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        bias = shape["qkv_bias"]
        self.q_proj = nn.Linear(hidden, heads * d, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(heads * d, hidden, bias=shape["o_bias"])
        self.norms_all_heads = shape["qk_norm"] == "all_heads"
        together = (heads, kv_heads) if self.norms_all_heads else (1, 1)
        norms = [norm_of(config, number * d) if shape["qk_norm"] else nn.Identity() for number in together]
        self.q_norm, self.k_norm = norms
        self.q_scale = 1.0 if shape["attention_scale"] is None else shape["attention_scale"] * d**0.5
        if layer in shape["gate_layers"]:
            self.output_gate = nn.Linear(hidden, heads * (1 if shape["output_gate"] == "head" else d), bias=False)
        self.kernels = load_kernels(config._name_or_path)
        self.kind = entry["kind"]
        self.add_module(self.kind, KINDS[self.kind](config, entry, layer))
        if layer in shape["sink_layers"]:
            if not KINDS[self.kind].takes_sink:
                raise ValueError(f"moba.layers[{layer}].kind: {self.kind!r} given, which takes no sink")
            self.sink = nn.ParameterDict({"weight": torch.zeros(heads)})

    def normalised(self, norm: nn.Module, x_BTc: Tensor) -> Tensor:
        """Normalised heads, [B, heads, T, d]."""
        heads = (-1, self.head_dim)
        x_BTHd = norm(x_BTc).unflatten(-1, heads) if self.norms_all_heads else norm(x_BTc.unflatten(-1, heads))
        return x_BTHd.transpose(1, 2)

    def forward(self, x_BTD: Tensor, rotate: Rotary, texts: Texts, cache: Any) -> Tensor:
        new = New(
            x_BTD,
            self.q_scale * self.normalised(self.q_norm, self.q_proj(x_BTD)),
            self.normalised(self.k_norm, self.k_proj(x_BTD)),
            self.v_proj(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2),
        )
        kind: Any = self.get_submodule(self.kind)
        store = BlockCacheLayer() if cache is None else cache.layers[self.layer]
        before = store.get_seq_length()
        q_BHTd, k_BKTd, v_BKTd = new[1:]
        if kind.keeps_state:
            # Caches count the tokens by their keys: one number each.
            k_BKTd, v_BKTd = k_BKTd[:, :1, :, :1], v_BKTd[:, :1, :, :1]
        else:
            k_BKTd = rotate(kind.prepare(new, rotate, store, texts))
            q_BHTd = rotate(q_BHTd)
        if cache is None:
            k_BKSd, v_BKSd = store.update(k_BKTd, v_BKTd)
        else:
            k_BKSd, v_BKSd = cache.update(k_BKTd, v_BKTd, self.layer)
        decodes_full = self.decodes_full and before > 0 and x_BTD.shape[1] == 1 and kind.decodes_full
        sink_H = self.sink["weight"] if "sink" in self._modules else None
        out_BHTd = torch.zeros_like(new.q)
        for text in texts:
            own = slice(max(0, text.first - before), None)  # without padding
            if before + x_BTD.shape[1] <= text.first:
                continue
            keys = k_BKSd[text.rows, :, text.first :], v_BKSd[text.rows, :, text.first :]
            of_text = New(new.x[text.rows, own], *(x[text.rows, :, own] for x in new[1:]))
            call = Call(q_BHTd[text.rows, :, own], *keys, text, store, of_text, rotate, self.kernels, sink_H)
            out_BHTd[text.rows, :, own] = kind(call, decodes_full)
        if "output_gate" in self._modules:
            gates_BTHg = self.output_gate(x_BTD).unflatten(-1, (out_BHTd.shape[1], -1))
            out_BHTd = out_BHTd * gates_BTHg.sigmoid().transpose(1, 2)
        return self.o_proj(out_BHTd.transpose(1, 2).flatten(2))


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """Hidden values of MiniMax-M3's feed-forward."""
    gate = gate.clamp(max=7.0)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-7.0, 7.0) + 1)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped": clamped,
}
"""Functions of the two projections of a feed-forward, by `activation`."""


class FeedForward(nn.Module):
    """Gated linear unit (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        widths = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(*widths, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(*widths[::-1], bias=False)
        self.hidden = GATED[shape_of(config)["activation"]]

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down_proj(self.hidden(self.gate_proj(x_BTD), self.up_proj(x_BTD)))
        return out_BTD


class Block(nn.Module):
    """Attention and a feed-forward, each between norms and added to its input."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        shape = shape_of(config)

        def norm(where: str) -> nn.Module:
            return norm_of(config, config.hidden_size) if shape["norms"] in (where, "both") else nn.Identity()

        self.input_layernorm = norm("pre")
        self.self_attn = Attention(config, layer)
        self.attention_post_norm = norm("post")
        self.post_attention_layernorm = norm("pre")
        has_experts = shape["moe"] is not None and layer in shape["moe"]["layers"]
        self.mlp = MixtureOfExperts(config, shape["moe"]) if has_experts else FeedForward(config)
        self.feed_forward_post_norm = norm("post")
        self.scale = shape["residual_scale"]

    def forward(self, x_BTD: Tensor, rotate: Rotary, texts: Texts, cache: Any) -> Tensor:
        update_BTD = self.self_attn(self.input_layernorm(x_BTD), rotate, texts, cache)
        x_BTD = x_BTD + self.scale * self.attention_post_norm(update_BTD)
        update_BTD = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + self.scale * self.feed_forward_post_norm(update_BTD)


class MobaForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model."""

    config_class: Any = MobaConfig
    _auto_class = "AutoModelForCausalLM"  # save_pretrained saves the code, also where transformers 5.0 knows the config
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _keep_in_fp32_modules_strict = ["mlp.bias"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        try:
            self._build(config)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            text = f"config.json: {type(error).__name__} {error}; allowed: what `convert moba-to-hf --with-code` writes"
            raise ValueError(text) from error
        self.post_init()

    def _build(self, config: Any) -> None:
        decode = getattr(config, "moba_decode", "full")
        entries = config.moba["layers"]
        if decode not in ("full", "own"):
            raise ValueError(f"moba_decode: {decode!r} given, allowed: full, own")
        if len(entries) != config.num_hidden_layers:
            raise ValueError(f"moba.layers: {len(entries)} given, {config.num_hidden_layers} needed")
        shape = shape_of(config)
        self.embedding_scale, self.logits_divisor = shape["embedding_scale"], shape["logits_divisor"]
        self.logits_cap = shape["logits_cap"]
        self.ropes = [rope_of(config, layer) for layer in range(len(entries))]
        # generate then refuses what would cut the cache.
        self._is_stateful = any(KINDS[entry["kind"]].keeps_state for entry in entries if entry.get("kind") in KINDS)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Block(config, layer) for layer in range(len(entries))),
                "norm": norm_of(config, config.hidden_size),
            }
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_others: Any) -> Tensor | None:
        """The mask of padding alone: attention makes its own."""
        return attention_mask

    def _valid_auto_compile_criteria(self, *_arguments: Any, **_others: Any) -> bool:
        """False: selections have another shape in each call."""
        return False

    def _get_candidate_generator(self, *arguments: Any, **others: Any) -> Any:
        """Source of the guesses of speculative decoding, several of which come in one call. Raises ValueError if one at
        a time they would be read otherwise."""
        for layer in self.model["layers"]:
            name = layer.self_attn.kind
            if not layer.self_attn.get_submodule(name).in_parts:
                raise ValueError(f"speculative decoding: not supported by layers of kind {name!r}")
            if name != "full" and getattr(self.config, "moba_decode", "full") == "full":
                raise ValueError("moba_decode: 'full' given, allowed with speculative decoding: own")
        return super()._get_candidate_generator(*arguments, **others)  # type: ignore[misc]  # transformers' own self

    def rotations(self, position_ids: Tensor) -> list[Rotary]:
        """The rotary embedding of each layer, one object for equal ones."""

        @functools.cache
        def made(rope: str) -> Rotary:
            return Rotary(functools.partial(rope_frequencies, json.loads(rope)), position_ids)

        return [made(json.dumps(rope)) for rope in self.ropes]

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
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss if there are labels: the mean of their tokens, or the sum over `num_items_in_batch`.
        `past_key_values` is the older name of `cache`. Autocast is not heeded: layers compute in their weights' dtype.

        Raises ValueError for a cache that is neither a DynamicCache nor a StaticCache, padding between tokens, and
        arguments that are not supported, such as output_attentions.
        """
        for name, value in others.items():
            # generate also hands on the tokenizer that it needs for `stop_strings`.
            if name not in ("return_dict", "cache_position", "tokenizer") and value is not None and value is not False:
                raise ValueError(f"{name}: given, but this model does not support it")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: exactly one of the two needed")
        x_BTD = self.model["embed_tokens"](input_ids) if inputs_embeds is None else inputs_embeds
        x_BTD = self.embedding_scale * x_BTD
        batch, new = x_BTD.shape[:2]
        cache = past_key_values if cache is None else cache
        caches = getattr(self.config, "use_cache", True) and not self.training if use_cache is None else use_cache
        if cache is None and caches:
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
        with torch.autocast(x_BTD.device.type, enabled=False):
            for block, rotate in zip(self.model["layers"], self.rotations(position_ids), strict=True):
                x_BTD = block(x_BTD, rotate, texts, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(self.model["norm"](x_BTD[:, kept])) / self.logits_divisor
        if self.logits_cap is not None:
            logits = self.logits_cap * (logits / self.logits_cap).tanh()
        loss = None
        if labels is not None:
            count = {"num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits, labels, self.config.vocab_size, **count)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: cache})


# transformers before 5.24 loads a class only for the config that it names.
class MobaLlamaForCausalLM(MobaForCausalLM):
    """The language model for an ordinary Llama's config."""

    config_class = LlamaConfig


class MobaQwen2ForCausalLM(MobaForCausalLM):
    """The language model for an ordinary Qwen2's config."""

    config_class = Qwen2Config


class MobaQwen3ForCausalLM(MobaForCausalLM):
    """The language model for an ordinary Qwen3's config."""

    config_class = Qwen3Config
