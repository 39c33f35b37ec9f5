"""Exports that run without this package: the modelling code that travels with the weights, and what it can run.

The code is remote_code/, for transformers with `trust_remote_code`. What it can do is listed here key by key, so that a
model with anything new is refused until the code has learnt it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moba_train.attention.kind import AttentionKind
from moba_train.output_files import write_new
from moba_train.tools.convert.hf_export import full_entry

CODE = Path(__file__).parent / "remote_code"
FILES = ("modeling_moba_train.py", "attention_moba_train.py")
CLASS = "modeling_moba_train.MobaForCausalLM"

LAYERS: dict[str, frozenset[str]] = {
    "full": frozenset(),
    "window": frozenset({"window", "sinks"}),
    "moba": frozenset({"block_size", "topk", "select", "always", "key_conv"}),
    "msa": frozenset({"mode", "block_size", "topk", "index_dim", "train_gate", "kl_weight"}),
}
"""Attention kinds of the code, and their options there (`Kind.OPTIONS`)."""
_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False}
_CONFIG = {
    *("architectures", "model_type", "dtype", "torch_dtype", "max_position_embeddings"),
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "initializer_range", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling"),
}
"""Keys of config.json that the code reads, or that change nothing it computes."""
_MODELS = ("llama", "qwen2", "qwen3")
_ROPES = {
    "linear": frozenset({"factor"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "high_freq_factor", "low_freq_factor"}),
}


def code_problems(contents: Mapping[str, Any], kinds: Sequence[AttentionKind]) -> Iterator[str]:
    """Reasons why the code cannot run a model with this config.json, before tokens and layers are in it, and with these
    attention kinds."""
    if contents["model_type"] not in _MODELS:
        yield f"model_type {contents['model_type']!r} is not one of {', '.join(_MODELS)}, which --with-code can run"
        return
    for key in sorted(contents.keys() - _CONFIG - _FIXED.keys()):
        yield f"{key} in config.json is unknown to the code of --with-code"
    for key, value in _FIXED.items():
        if contents.get(key, value) != value:
            yield f"{key} in config.json is {contents[key]!r}; the code of --with-code knows {value!r}"
    rope = contents["rope_scaling"]
    if rope is not None and (
        rope["rope_type"] not in _ROPES or rope.keys() - {"rope_type"} - _ROPES[rope["rope_type"]]
    ):
        yield f"rope_scaling {rope} in config.json is unknown to the code of --with-code"
    for kind in dict.fromkeys(kinds):
        if kind.name not in LAYERS:
            yield f"kind {kind.name!r} is not one of {', '.join(LAYERS)}, which the code of --with-code can run"
        else:
            for option in sorted(full_entry(kind).keys() - {"kind"} - LAYERS[kind.name]):
                yield f"option {option!r} of kind {kind.name!r} is unknown to the code of --with-code"


def write_code(output: Path) -> None:
    """Write the code into the folder of an export."""
    for name in FILES:
        write_new(output / name, (CODE / name).read_bytes())


def code_config(kinds: Sequence[AttentionKind], needed: bool) -> dict[str, Any]:
    """Entries of config.json for the code: the attention of each layer and of new tokens, and where the code is.

    needed: kinds have parameters, so that the ordinary architecture would compute something else. Programs that go by
    the architecture's name then refuse the model; transformers without `trust_remote_code` does not look at it.
    """
    own = {"architectures": [CLASS.rpartition(".")[2]]} if needed else {}
    return own | {
        "moba": {"layers": [full_entry(kind) for kind in kinds]},
        "moba_decode": "full",
        "auto_map": {"AutoModelForCausalLM": CLASS},
    }
