"""Tiny random models of transformers, saved as it saves them, and the same weights in ours."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import packed_layout
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import model_tensors
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.load import dump_config
from moba_train.config.schema import RunConfig
from moba_train.model.build import build_attention, build_model
from moba_train.model.spec import model_spec
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import joined_world
from moba_train.registry import MODEL_FAMILIES
from moba_train.run.progress import Progress
from moba_train.tools.convert.hf_export import read_layers
from moba_train.tools.hf.config import read_family, read_model_config
from moba_train.tools.hf.family import family_of
from moba_train.tools.hf.weights import load_hf_weights

VOCAB = 64
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ORIGINAL = {"original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 6, "rope_parameters": {"rope_theta": 1e4}},
    "llama3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 5e5, **_LLAMA3, **_ORIGINAL},
    },
    "smollm2": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "linear", "factor": 4.0},
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, **_ORIGINAL},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24, "rope_parameters": {"rope_theta": 1e6}},
    "ministral": {
        "model_type": "ministral",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_theta": 1e6},
    },
    "smollm3": {
        "model_type": "smollm3",
        "pad_token_id": None,
        "no_rope_layer_interval": 2,
        "rope_parameters": {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0, **_ORIGINAL},
    },
    "olmo2": {"model_type": "olmo2", "pad_token_id": None, "rope_parameters": {"rope_theta": 5e5}},
    "olmo3": {
        "model_type": "olmo3",
        "pad_token_id": None,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, **_ORIGINAL},
            "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
        },
    },
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 24,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attn_implementation": "eager",
        "rope_parameters": {"rope_theta": 1e4},
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.22,
        "logits_scaling": 7.0,
        "rope_parameters": {"rope_theta": 1e4},
    },
    "phi3": {
        "model_type": "phi3",
        "sliding_window": 24,
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "phi3_long": {
        "model_type": "phi3",
        "pad_token_id": None,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3],
            "long_factor": [1.0, 2.5, 6.0],
        },
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "rope_parameters": {"rope_theta": 1e6}},
    "mixtral_windows": {
        "model_type": "mixtral",
        "num_local_experts": 3,
        "sliding_window": 24,
        "rope_parameters": {"rope_theta": 1e6},
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_theta": 1e6},
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 40,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25},
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "swiglu_limit": 0.5,
        "sliding_window": 24,
        "rope_parameters": {"rope_theta": 1.5e5, "rope_type": "yarn", "factor": 4.0, "truncate": False, **_ORIGINAL},
    },
    "qwen3_moe_dense": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e6},
    },
}


PUBLISHED = [name for name in MODEL_FAMILIES if not MODEL_FAMILIES[name].asked_for]
"""Families that an export may take by itself."""


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
"""Sizes of the models, unless FAMILIES has others."""


def sized(model_type: str) -> dict[str, Any]:
    """A config.json that says nothing but the sizes of a model."""
    few = {"hidden_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 32}
    return {"model_type": model_type, **dict.fromkeys(family_of(model_type).sizes(), 4096), **few}


def make_hf_model(family: str, folder: Path, **changes: Any) -> Any:
    """A model of transformers with random weights, biases and norms included, in `folder` as several files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # transformers writes into the sections that it is given.
    config = AutoConfig.for_model(**deepcopy(SHAPE | FAMILIES[family] | changes))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


def our_model(folder: Path, kinds: Sequence[AttentionKind] | None = None) -> Transformer:
    """The Hugging Face model in `folder` as our Transformer, with its own attention unless told."""
    config = read_model_config(folder)
    layers = resolve_layers(AttentionConfig.model_validate(read_layers(folder)), config.layers)
    model = build_model(model_spec(config, [layers]))
    load_hf_weights(model, folder)
    model.set_attention(kinds or build_attention(layers, config.head_width))
    return model.eval()


@torch.no_grad()
def logits(model: Transformer, tokens_T: Tensor) -> Tensor:
    """[T, V], the tokens as one document."""
    return model(tokens_T, torch.arange(len(tokens_T)), packed_layout([len(tokens_T)]))


def random_tokens(count: int) -> Tensor:
    """int64 [count], always the same."""
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(count))


def save_as_checkpoint(hf: Path, run_dir: Path, moba: dict[str, Any], tokenizer: Path | None) -> None:
    """The Hugging Face model in `hf` as a checkpoint of ours, MoBA in all layers but the last and those with a window.

    tokenizer  what its recipe names as data.tokenizer
    """
    family, contents = read_family(hf)
    windows = {layer: entry for layer, entry in enumerate(family.attention(contents)) if entry}
    recipe = {
        "name": "imported",
        "run_dir": str(run_dir),
        "model": read_model_config(hf).model_dump(),
        "attention": {"full_layers": "last:1", "moba": moba, "overrides": windows},
        "data": {"tokenizer": tokenizer and str(tokenizer), "train": [{"path": "none"}]},
        "batch_tokens": 256,
        "stages": [{"name": "long", "seq_len": 256, "tokens": 256}],
    }
    config = RunConfig.model_validate(recipe)
    with joined_world():
        checkpointer = Checkpointer(run_dir / "checkpoints", Retention(1))
        meta = {"progress": Progress().to_meta(), "config": dump_config(config)}
        checkpointer.save(1, model_tensors(our_model(hf)), meta)
        checkpointer.close()
        assert checkpointer.last_error is None
