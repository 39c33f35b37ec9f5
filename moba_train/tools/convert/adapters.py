"""Adapters of a checkpoint: merged into their base for an export, or as a folder that `peft` loads on the base."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from moba_train.checkpoint.load import CheckpointReader
from moba_train.checkpoint.manifest import verify_checkpoint
from moba_train.checkpoint.publish import find_checkpoint
from moba_train.errors import CheckpointError
from moba_train.mechanisms.lora import CHANGE, CHECKSUM, A, B, LoraOptions, checksum, merged
from moba_train.model.build import build_attention
from moba_train.model.spec import ModelSpec
from moba_train.output_files import write_new
from moba_train.tools.convert.hf_export import hf_config, new_folder, write_safetensors
from moba_train.tools.convert.model_card import CARD, adapters_card
from moba_train.tools.hf.config import is_hf_folder, read_family, read_model_config
from moba_train.tools.hf.family import NUMBER, family_of
from moba_train.tools.hf.files import SINGLE
from moba_train.tools.hf.mxfp4 import open_weights
from moba_train.tools.hf.weights import buffer_shapes, check_hf_weights, parameter_shapes, places
from moba_train.tools.saved_recipe import SavedRun, base_folder

PEFT_CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""Beginning of the names of tensors in a folder of `peft`'s."""


class MergedReader(CheckpointReader):
    """Reads a checkpoint with adapters as that of the model with the adapters merged into its weights, float32."""

    def __init__(self, saved: SavedRun) -> None:
        super().__init__(saved.path)
        self._options = lora_options(saved.spec)
        self._sum = 0
        folder = base_folder(saved)
        self._read_base: Callable[[str], Tensor]
        if is_hf_folder(folder):
            files = open_weights(folder)
            family, config = read_family(folder)
            shapes = parameter_shapes(saved.config.model) | buffer_shapes(read_model_config(folder), family)
            check_hf_weights(shapes, files)
            found = places(config, family, shapes)
            self._read_base = lambda name: found[name.removeprefix("model.")].read(files).float()
        else:
            self._read_base = CheckpointReader(find_checkpoint(folder)[0]).read

    def read(self, name: str) -> Tensor:
        """The tensor of that name, which may be one of the base's."""
        if name in self.tensors:
            return super().read(name)
        value = self._read_base(name)
        self._sum += int(checksum(value))
        module = name.removesuffix("weight")
        ends = [end for end in (A, B, CHANGE) if module + end in self.tensors]
        return merged(value, {end: self.read(module + end) for end in ends}, self._options) if ends else value

    def for_peft(self, name: str) -> Tensor:
        """The tensor of the adapters that peft has: of DoRA the magnitudes, not their change."""
        value = self.read(name)
        if not name.endswith(CHANGE):
            return value
        base = self._read_base(f"{name.removesuffix(CHANGE)}weight")
        return (value.double() + base.double().norm(dim=1)).float()

    def check(self) -> None:
        """Compare the base, every parameter of which has been read once, with that of the training."""
        if (self._sum - int(self.read(f"model.{CHECKSUM}"))) % 2**64:
            raise CheckpointError(
                "init_from: holds other weights than those with which the adapters were trained; restore that model"
            )


def lora_options(spec: ModelSpec) -> LoraOptions:
    """Options of the adapters. Raises CheckpointError for a model without, or with others."""
    options = spec.adapters[1] if spec.adapters is not None else None
    if not isinstance(options, LoraOptions):
        raise CheckpointError("the checkpoint has no LoRA adapters; give one of a run with adapters.lora")
    return options


def export_adapters(saved: SavedRun, output: Path) -> None:
    """Write `output`, a folder that `peft` loads on the model that the adapters were trained on: adapter_config.json,
    the adapters, float32, and a model card.

    Raises CheckpointError when the checkpoint has no adapters, a byte of it has changed since it was written, `peft`
    cannot have what it trained, the base of DoRA is another one, or `output` is not empty or cannot be written.
    """
    options = lora_options(saved.spec)
    reader = MergedReader(saved)
    shape = saved.config.model
    family = family_of(
        hf_config(shape, saved.stage.rope, saved.stage.seq_len, "float32", [{}] * shape.layers)["model_type"]
    )
    theirs = {name: family.name(name) for name in parameter_shapes(shape)}
    joined = {name for name, count in Counter(theirs.values()).items() if count > 1 or NUMBER in name}
    found: dict[str, str] = {}
    targets: set[str] = set()
    whole: set[str] = set()
    for name in reader.tensors:
        ours = name.removeprefix("model.")
        if ours in (name, CHECKSUM):
            continue
        if name.endswith("feed_forward.bias") and f"{name.removesuffix('bias')}router.weight" not in reader.tensors:
            continue  # of a router that was not trained: the base's
        end = next((end for end in (A, B, CHANGE) if ours.endswith(f".{end}")), "")
        weight = f"{ours.removesuffix(end)}weight" if end else ours
        if weight not in theirs or theirs[weight] in joined:
            raise CheckpointError(
                f"{saved.path}: peft has no place for {ours}; merge it: moba-train convert moba-to-hf"
            )
        module = theirs[weight].rpartition(".")[0]
        (targets if end else whole).add(module)
        last = end.replace(CHANGE, "lora_magnitude_vector") or "weight"
        found[f"{PREFIX}{module}.{last}"] = name
        if ours == "embedding.weight" and shape.tie_embeddings:  # which peft unties
            head = family.name("output.weight")
            whole.add(head.removesuffix(".weight"))
            found[f"{PREFIX}{head}"] = name
    verify_checkpoint(saved.path)
    if options.use_dora:  # peft's magnitudes have the norms of the base in them
        for name in theirs:
            if f"model.{name}" not in reader.tensors:
                reader.read(f"model.{name}")
        reader.check()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": saved.config.init_from,
        "bias": "none",
        "inference_mode": True,
        **options.model_dump(),
        "target_modules": sorted(targets),
        "modules_to_save": sorted(whole) or None,
    }
    with new_folder(output):
        write_safetensors(output, ((theirs, reader.for_peft(ours)) for theirs, ours in found.items()), 2**62)
        (output / SINGLE).rename(output / "adapter_model.safetensors")
        write_new(output / CARD, adapters_card(saved, build_attention(saved.stage.attention, shape.head_width)))
        write_new(output / PEFT_CONFIG, json.dumps(config, indent=2) + "\n")
