"""Exports that run without this package: the modelling code that travels with the weights, and what it can run.

The code is remote_code/, for transformers with `trust_remote_code`. The kinds and options that it can run are listed
here, so that a kind with anything new is refused until the code has learnt it; `tools/hf/own.py` (`SHAPE`) lists the
rest of a model.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moba_train.attention.kind import AttentionKind
from moba_train.config.model import LayerRope
from moba_train.output_files import write_new
from moba_train.tools.convert.hf_export import full_entry
from moba_train.tools.convert.kernel_folder import write_kernels
from moba_train.tools.hf.family import Family

CODE = Path(__file__).parent / "remote_code"
DESCRIPTIONS = {
    "modeling_moba_train.py": "the model's code, for transformers without moba_train",
    "attention_moba_train.py": "its attention to all tokens, to windows and to blocks",
    "selectors_moba_train.py": "its other selections of blocks",
    "nsa_moba_train.py": "its compressed, selected and window attention",
    "linear_moba_train.py": "its attention with a state",
    "experts_moba_train.py": "its experts",
    "cache_moba_train.py": "what it keeps of earlier tokens",
    "kernels": "its kernels for NVIDIA GPUs, which may be left out",
}
"""The code's files, and the folder of kernels."""
_MODULE = "modeling_moba_train"
_OWN = "moba_train"
"""model_type of models that only the code can run."""
_PLAIN = ("llama", "qwen2", "qwen3")
"""Ordinary models that the code can run."""

_GATE = {"mode", "block_size", "topk", "train_gate", "kl_weight"}
LAYERS: dict[str, frozenset[str]] = {
    "full": frozenset(),
    "window": frozenset({"window", "sinks"}),
    "moba": frozenset({"block_size", "topk", "select", "always", "key_conv"}),
    "moba_window": frozenset({"block_size", "topk", "select", "always", "key_conv", "window"}),
    "msa": frozenset(_GATE | {"index_dim", "index_keys"}),
    "qsa": frozenset(_GATE | {"index_dim"}),
    "indexer": frozenset(_GATE | {"index_dim", "index_heads", "first_blocks", "local_blocks", "top_p", "coarse"}),
    "seer": frozenset(_GATE | {"threshold", "gate_dim"}),
    "infllm_v2": frozenset({"block_size", "topk", "first_blocks", "local_blocks", "window", "stride", "dense_len"}),
    "nsa": frozenset(
        {"compressed_block", "stride", "hidden", "block_size", "topk", "first", "local", "window", "separate_kv"}
    ),
    "lightning": frozenset({"decay"}),
    "gdn": frozenset(),
    "kda": frozenset(),
}
"""Attention kinds of the code, and their options there (`Kind.OPTIONS`)."""
ROPES = ("none", "abf", "pi", "yarn", "llama3", "nope")
"""Kinds of rotary embedding of the code."""


def code_families(needed: bool) -> tuple[str, ...]:
    """Families whose models the code runs. needed: attention kinds have parameters, so that an ordinary model would
    compute something else."""
    return (_OWN,) if needed else (*_PLAIN, _OWN)


def code_problems(kinds: Sequence[AttentionKind], ropes: Sequence[LayerRope]) -> Iterator[str]:
    """Reasons why the code cannot run a model whose layers have these attention kinds and rotary embeddings."""
    for rope in dict.fromkeys(rope.kind for rope in ropes):
        if rope not in ROPES:
            yield f"rope {rope!r} is not one of {', '.join(ROPES)}, which the code of --with-code can run"
    for kind in dict.fromkeys(kinds):
        if kind.name not in LAYERS:
            yield f"kind {kind.name!r} is not one of {', '.join(LAYERS)}, which the code of --with-code can run"
        else:
            given = {option for option, value in full_entry(kind).items() if value is not None}
            for option in sorted(given - {"kind"} - LAYERS[kind.name]):
                yield f"option {option!r} of kind {kind.name!r} is unknown to the code of --with-code"


def write_code(output: Path) -> None:
    """Write the code and its kernels into the folder of an export."""
    for file in CODE.glob("*_moba_train.py"):
        write_new(output / file.name, file.read_bytes())
    write_kernels(output)


def code_config(family: Family) -> dict[str, Any]:
    """Entries of config.json for the code. A model that needs the code also names the code's config, so that
    transformers refuses it without `trust_remote_code`."""
    if family.needs_code:
        classes = {"AutoModelForCausalLM": f"{_MODULE}.MobaForCausalLM", "AutoConfig": f"{_MODULE}.MobaConfig"}
    else:
        classes = {"AutoModelForCausalLM": f"{_MODULE}.Moba{family.architecture}"}
    return {"moba_decode": "full", "auto_map": classes}
