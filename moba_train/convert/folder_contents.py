"""What a conversion wrote, for the terminal: each file once, with what it is."""

from collections.abc import Iterator
from pathlib import Path

_WEIGHTS = "*.safetensors"
_FILES = {
    "config.json": "architecture, RoPE, longest sequence, ids of special tokens, and each layer's attention (`moba`)",
    "generation_config.json": "token ids that begin, end and pad a text",
    "model.safetensors.index.json": "names the file of each tensor",
    "tokenizer.json": "the tokenizer",
    "tokenizer.model": "the tokenizer as a sentencepiece model",
    "sentencepiece.model": "the tokenizer as a sentencepiece model, which transformers does not read",
    "tokenizer_config.json": "the tokenizer's class, special tokens and options",
    "special_tokens_map.json": "the tokenizer's special tokens",
    "added_tokens.json": "tokens added to the vocabulary",
    "vocab.json": "the tokenizer's vocabulary",
    "merges.txt": "the tokenizer's merges",
    "chat_template.jinja": "the chat template",
    "chat_template.json": "the chat template",
    "recipe.yaml": "recipe to extend with data and stages of your own",
}


def describe_folder(folder: Path) -> Iterator[str]:
    """A line for each file that a conversion wrote into `folder`; all files of weights have one line."""
    lines: list[tuple[str, str]] = []
    if weights := list(folder.glob(_WEIGHTS)):
        name = weights[0].name if len(weights) == 1 else f"model-*.safetensors ({len(weights)} files)"
        lines.append((name, f"weights, {_gigabytes(weights)}"))
    for checkpoint in folder.glob("checkpoints/step_*"):
        size = _gigabytes(list(checkpoint.iterdir()))
        lines.append(
            (f"{checkpoint.relative_to(folder)}/", f"checkpoint: float32 weights without optimizer state, {size}")
        )
    lines += [(name, text) for name, text in _FILES.items() if (folder / name).is_file()]
    width = max((len(name) for name, _ in lines), default=0)
    yield from (f"  {name:{width}}  {text}" for name, text in lines)


def _gigabytes(files: list[Path]) -> str:
    total = sum(file.stat().st_size for file in files)
    return f"{total / 1e9:,.1f} GB" if total >= 1e8 else f"{total / 1e6:,.1f} MB"
