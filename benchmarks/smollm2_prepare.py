"""Converts SmolLM2-135M-Instruct from GGUF to a Hugging Face folder, and tokenizes a corpus of long real documents.

    python -m benchmarks.smollm2_prepare weights --gguf FILE --output runs/smollm2/hf
    python -m benchmarks.smollm2_prepare corpus --tokenizer runs/smollm2/hf/tokenizer.json --output runs/smollm2/data

The weights are dequantised to float32 exactly, as `transformers` does it. The packages `gguf` and `tokenizers` are
needed. A document is a Python package, its modules one after the other: long, real, and with names that return after
tens of thousands of tokens.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_tools.corpus_writer import IndexedDatasetWriter, dtype_for
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.tools.convert.hf_export import hf_config, write_safetensors
from moba_train.tools.hf.config import CONFIG

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    weights = commands.add_parser("weights", help="GGUF to a Hugging Face folder")
    weights.add_argument("--gguf", type=Path, required=True)
    weights.add_argument("--output", type=Path, required=True)
    weights.set_defaults(run=lambda given: convert_gguf(given.gguf, given.output))
    corpus = commands.add_parser("corpus", help="installed Python packages to train.bin and valid.bin")
    corpus.add_argument("--tokenizer", type=Path, required=True)
    corpus.add_argument("--input", type=Path, nargs="*", help="folders of packages; default: this Python's own")
    corpus.add_argument("--output", type=Path, required=True)
    corpus.add_argument("--valid", nargs="*", default=["asyncio", "fontTools", "jinja2", "networkx"])
    corpus.add_argument(
        "--max-bytes", type=int, default=8_000_000, help="bytes read of one package; the rest is left out"
    )
    corpus.set_defaults(run=write_corpora)
    given = parser.parse_args()
    given.run(given)


def convert_gguf(path: Path, output: Path) -> None:
    """Write `output`: config.json, model.safetensors (float32) and the tokenizer."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    output.mkdir(parents=True, exist_ok=True)
    model = model_config(reader)
    length = int(_field(reader, "llama.context_length"))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for entry in reader.tensors:
            values = torch.from_numpy(dequantize(entry.data, entry.tensor_type).astype(np.float32))
            heads = {"attn_q": model.heads, "attn_k": model.kv_heads}.get(entry.name.split(".")[-2])
            yield hf_name(entry.name), values if heads is None else halves_from_pairs(values, heads)

    write_safetensors(output, tensors(), shard_bytes=2**40)
    config = hf_config(model, model.rope, length, "float32")
    (output / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(reader, output)


def model_config(reader: Any) -> ModelConfig:
    """The model's shape, from the file's metadata."""
    keys = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "layers": "block_count",
        "heads": "attention.head_count",
        "kv_heads": "attention.head_count_kv",
        "vocab_size": "vocab_size",
    }
    return ModelConfig(
        **{ours: int(_field(reader, f"llama.{theirs}")) for ours, theirs in keys.items()},
        norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),  # a float32 1e-5
        rope=RopeConfig(theta=_field(reader, "llama.rope.freq_base")),
        tie_embeddings=all(entry.name != "output.weight" for entry in reader.tensors),
    )


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor: `model.layers.3.self_attn.q_proj.weight` for `blk.3.attn_q.weight`."""
    if name.startswith("blk."):
        _, layer, part, suffix = name.split(".")
        return f"model.layers.{layer}.{_PARTS[part]}.{suffix}"
    part, suffix = name.split(".")
    return f"{_TOP_LEVEL[part]}.{suffix}"


def halves_from_pairs(weight_OI: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection: GGUF rotates neighbouring rows, our model the halves of a head."""
    return weight_OI.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight_OI.shape).contiguous()


def write_tokenizer(reader: Any, output: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE that splits digits, as SmolLM2's own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True) if kind == 3
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(output / "tokenizer.json"))
    special = {
        f"{name}_token": tokens[int(_field(reader, f"tokenizer.ggml.{key}_token_id"))]
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "chat_template": _field(reader, "tokenizer.chat_template"),
        "model_max_length": int(_field(reader, "llama.context_length")),
        "clean_up_tokenization_spaces": False,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    ids = {f"{name}_token_id": tokens.index(special[f"{name}_token"]) for name in ("bos", "eos", "pad")}
    (output / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def _field(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def write_corpora(given: argparse.Namespace) -> None:
    """Write the corpora `train` and `valid` to `given.output`; no package is in both."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    end = tokenizer.token_to_id("<|endoftext|>")
    size = tokenizer.get_vocab_size()
    paths = sysconfig.get_paths()
    given.output.mkdir(parents=True, exist_ok=True)
    with (
        IndexedDatasetWriter(given.output / "train", dtype_for(size), {"vocab_size": size}) as train,
        IndexedDatasetWriter(given.output / "valid", dtype_for(size), {"vocab_size": size}) as valid,
    ):
        for package, modules in packages(given.input or [Path(paths["stdlib"]), Path(paths["purelib"])]):
            texts = list(read_modules(package, modules, given.max_bytes))
            ids = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
            tokens = np.array([token for module in ids for token in module] + [end], dtype=dtype_for(size))
            writer = valid if package.name in given.valid else train
            writer.add_document(tokens)
        for writer in (train, valid):
            print(f"{writer.prefix}: {writer.documents} documents, {writer.tokens:,} tokens")


def packages(roots: list[Path]) -> Iterator[tuple[Path, list[Path]]]:
    """Folders with Python modules directly below `roots`, each with its modules, in a fixed order."""
    seen = set()
    for root in roots:
        for package in sorted(path for path in root.iterdir() if path.is_dir() and path.name.isidentifier()):
            modules = [path for path in sorted(package.rglob("*.py")) if "_vendor" not in path.parts]
            if modules and package.name not in seen:
                seen.add(package.name)
                yield package, modules


def read_modules(package: Path, modules: list[Path], max_bytes: int) -> Iterator[str]:
    """Each module's text under its name, up to `max_bytes` in all; modules that are not UTF-8 are left out."""
    used = 0
    for path in modules:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        used += len(text)
        if used > max_bytes:
            return
        yield f"# {path.relative_to(package.parent)}\n{text.strip()}\n\n"


if __name__ == "__main__":
    main()
