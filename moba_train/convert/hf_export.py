"""Export of a checkpoint to a Hugging Face folder, a tensor at a time."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moba_train.attention.kind import AttentionKind
from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.manifest import verify_checkpoint
from moba_train.checkpoint.recipe import SavedRun
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.convert.hf_config import CONFIG, hf_config
from moba_train.convert.hf_names import hf_name
from moba_train.convert.hf_tokenizer import export_tokenizer
from moba_train.convert.hf_weights import parameter_shapes
from moba_train.convert.new_folder import check_new_folder, new_folder
from moba_train.convert.safetensors_folder import write_safetensors
from moba_train.errors import CheckpointError
from moba_train.foreign_files import working_roots
from moba_train.model.build import build_attention, kind_shapes


def export_to_hf(saved: SavedRun, output: Path, dtype: torch.dtype, shard_bytes: int) -> list[str]:
    """Write `output`, a Hugging Face folder with the model of a checkpoint.

    Holds the tensors of one file of at most `shard_bytes`. RoPE, sequence length and attention are those of the stage
    the checkpoint was in; config.json keeps the attention of every layer under `moba`; software that ignores the
    entry sees an ordinary Llama, Qwen2 or Qwen3 with full attention. The tokenizer's files are those that transformers
    expects. Returns a warning for each thing that is left out.

    Raises CheckpointError when `output` is not empty or cannot be written, no Hugging Face architecture has the model's
    shape, an attention kind would lose something, a tensor is missing in the checkpoint, or a byte of it has changed
    since it was written.
    """
    checkpoint, config, stage = saved
    contents = hf_config(config.model, stage.rope, stage.seq_len, str(dtype).removeprefix("torch."))
    kinds = build_attention(stage.attention, config.model.head_width)
    if problems := _export_problems(config, kinds):
        raise CheckpointError(f"{checkpoint} cannot be exported: {'; '.join(problems)}")
    contents["moba"] = {"layers": [kind.export_entry() for kind in kinds]}
    check_new_folder(output)
    verify_checkpoint(checkpoint)
    reader = _reader(checkpoint, config.model)
    tokenizer = export_tokenizer(config, contents["model_type"], stage.seq_len, working_roots())
    contents |= tokenizer.ids
    with new_folder(output):
        for name, content in tokenizer.files.items():
            (output / name).write_bytes(content)
        write_safetensors(output, _tensors(reader, config.model, dtype), shard_bytes)
        # Written last: a folder without it is not read as a model.
        (output / CONFIG).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    return tokenizer.warnings


def _export_problems(config: RunConfig, kinds: Sequence[AttentionKind]) -> list[str]:
    """Losses of an export: what kinds of the stage would lose, and parameters of kinds that only other stages use."""
    problems = dict.fromkeys(kind.export_problem(config.model) for kind in kinds)
    active = {kind.name for kind in kinds}
    left: Counter[str] = Counter()
    for (_, name), shapes in kind_shapes(config).items():
        left[name] += len(shapes)
    for name, tensors in left.items():
        if name not in active:
            problems[f"kind {name!r} of another stage left {tensors} parameter tensors in the model"] = None
    return [problem for problem in problems if problem]


def _reader(checkpoint: Path, model: ModelConfig) -> CheckpointReader:
    """A reader of a checkpoint that has every parameter of the model. Raises CheckpointError when one is missing or has
    another shape."""
    reader = CheckpointReader(checkpoint)
    problems = []
    for name, shape in parameter_shapes(model).items():
        saved = reader.tensors.get(f"model.{name}")
        if saved is None:
            problems.append(f"{name} is not in its index")
        elif (saved.shape, saved.dtype) != (shape, torch.float32):
            problems.append(f"{name} is {list(saved.shape)} {saved.dtype}, must be {list(shape)} float32")
    if problems:
        raise CheckpointError(f"{checkpoint} cannot be exported: {'; '.join(problems[:20])}; use another checkpoint")
    return reader


def _tensors(reader: CheckpointReader, model: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The parameters, by their names in the export. Raises CheckpointError for one that `dtype` has no numbers for."""
    for name in parameter_shapes(model):
        value = reader.read(f"model.{name}")
        found = value.to(dtype)
        if found.isinf().any() and not value.isinf().any():
            most = torch.finfo(dtype).max
            raise CheckpointError(
                f"--dtype {str(dtype).removeprefix('torch.')}: {name} has values up to {value.abs().max():g}; allowed: "
                f"at most {most:g}; take bfloat16 or float32"
            )
        yield hf_name(name), found
