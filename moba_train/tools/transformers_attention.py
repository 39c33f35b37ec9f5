"""Hugging Face `transformers` with MoBA: an attention function for its registry.

    from moba_train.tools.transformers_attention import register
    register()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="moba")

FOLDER is what `moba-train convert moba-to-hf` wrote: its config.json says under `moba` how each layer attends. Prompts
are read with each layer's own attention. New tokens attend to all keys, as in the MoBA paper (`decode="full"`), except
in layers with windows, or with the layer's own attention (`decode="own"`).
"""

from typing import Any

import torch
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common.merge import with_sink
from moba_train.attention.layout import Layout, TokenRange
from moba_train.attention.protocol import LocalAttention
from moba_train.model.build import build_attention
from moba_train.tools.hf.config import parse_layer
from moba_train.tools.inference.cache import Decode, check_decode

_decode: Decode = "full"


def register(decode: Decode = "full") -> None:
    """Make `attn_implementation="moba"` known to transformers. A second call changes how new tokens attend.

    Raises ValueError for another `decode`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    check_decode(decode)
    global _decode
    _decode = decode
    AttentionInterface.register("moba", attention_forward)
    AttentionMaskInterface.register("moba", flash_attention_mask)  # the padding alone, never [T, T]


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer of a transformers model, with the signature that its registry asks for.

    query [B, H, T, D], key and value [B, K, S, D]; the queries are the last T of the S tokens. `attention_mask` [B, S]
    is 0 at padding, None without any; `s_aux` [H]: learned sinks. Returns out [B, T, H, D]; rows of padding are 0.
    Documents packed into one row are not distinguished, and a static cache is not supported. Raises ValueError for
    dropout, a mask of another shape, and a layer whose attention the config does not give.
    """
    if dropout:
        raise ValueError(f"attention_dropout: {dropout} given, allowed: 0 with attn_implementation='moba'")
    if attention_mask is not None and attention_mask.shape != (key.shape[0], key.shape[2]):
        raise ValueError(
            f"attention_mask: shape {tuple(attention_mask.shape)} given, [batch, keys] = "
            f"{(key.shape[0], key.shape[2])} needed"
        )
    if scaling is not None and abs((factor := scaling * query.shape[-1] ** 0.5) - 1) > 1e-6:
        query = query * factor  # scores are multiplied by head_dim ** -0.5
    attention = _attention(module)
    sink = () if s_aux is None else (s_aux,)
    out_BTHD = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
    queries = query.shape[2]
    for row in range(query.shape[0]):
        # Blocks are counted from a row's first token, not from its padding.
        q_THD, k_SKD, v_SKD = (x[row].transpose(0, 1).contiguous() for x in (query, key, value))
        if attention_mask is None:
            out_BTHD[row] = _attend(q_THD, k_SKD, v_SKD, attention, *sink)
            continue
        keys = attention_mask[row].bool()
        rows = keys[-queries:]
        out_BTHD[row, rows] = _attend(q_THD[rows], k_SKD[keys], v_SKD[keys], attention, *sink)
    return out_BTHD, None


def _attend(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, *sink: Tensor) -> Tensor:
    """Causal attention of the last T tokens of one document of S tokens."""
    total, queries = len(k_SKD), len(q_THD)
    cu_seqlens = torch.tensor([0, total], dtype=torch.int32, device=q_THD.device)
    if queries == total:
        return LOCAL_ENGINE(q_THD, k_SKD, v_SKD, attention, Layout(cu_seqlens, total, total), *sink)[0]
    if _decode == "full" and queries == 1 and attention.facts.decodes_full:
        attention = FullAttention(FullAttention.Options(), q_THD.shape[-1])
    layout = Layout(cu_seqlens, total, total, q_ranges=(TokenRange(total - queries, total),))
    selection = attention.select(q_THD, attention.summarize(k_SKD, layout), layout)
    return with_sink(*attention.attend(q_THD, k_SKD, v_SKD, layout, selection), *sink)[0]


def _attention(module: Any) -> LocalAttention:
    """Attention of the layer `module`, from the model's config."""
    entry = getattr(module.config, "moba", None)
    if entry is None:
        raise ValueError(
            "config.json has no `moba` entry, which says how each layer attends; export the model with "
            "`moba-train convert moba-to-hf`, or set config.moba = {'layers': [{'kind': 'moba', 'block_size': 512, "
            "'topk': 8}, ...]}, an item for each layer"
        )
    (kind,) = build_attention([parse_layer(entry["layers"][module.layer_idx])], module.head_dim)
    if len(kind.attentions) != 1:
        raise ValueError(f"layer {module.layer_idx}: kind {kind.name!r} is not one call of an attention function")
    return kind.attentions[0]
