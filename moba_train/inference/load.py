"""A trained model on one device, from a checkpoint."""

from pathlib import Path

import torch
import yaml

from moba_train.checkpoint.publish import latest_checkpoint, read_meta
from moba_train.checkpoint.state import load_model
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.errors import CheckpointError
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer


def find_checkpoint(path: Path) -> Path:
    """`path` itself when it is a checkpoint, else the newest one of the run folder `path`."""
    if (path / "manifest.json").is_file():
        return path
    newest = latest_checkpoint(path / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{path}: neither a checkpoint nor a run folder with a valid one in {path}/checkpoints")
    return newest


def load_trained(
    checkpoint: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Transformer, RunConfig, Stage]:
    """The model of a checkpoint on `device` in `dtype`, its recipe, and the stage it was in (attention, RoPE)."""
    meta = read_meta(checkpoint)
    config = RunConfig.model_validate(yaml.safe_load(meta["config"]))
    stage = resolve_stages(config)[meta["progress"]["stage"]]
    with torch.device("meta"):
        model = Transformer(config.model)
    model.to_empty(device=device)
    load_model(model, checkpoint)
    model.set_attention(build_attention(stage.attention, config.model.head_width))
    model.set_rope(stage.rope)
    return model.to(dtype).eval(), config, stage
