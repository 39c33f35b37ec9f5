"""A trained model on one device, from a checkpoint."""

from pathlib import Path

import torch

from moba_train.checkpoint.recipe import saved_recipe, saved_stage
from moba_train.checkpoint.state import load_model
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.config.validate import validate
from moba_train.inference.foreign import check_paths
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer


def read_recipe(checkpoint: Path) -> tuple[RunConfig, Stage]:
    """The recipe of a checkpoint and the stage it was in.

    Raises CheckpointError when the checkpoint is damaged or its recipe names files it must not (`check_paths`)."""
    config = saved_recipe(checkpoint)
    validate(config.model_copy(update={"init_from": None}))  # where it began no longer matters
    check_paths(config, checkpoint)
    return config, saved_stage(checkpoint, config)


def load_trained(
    checkpoint: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Transformer, RunConfig, Stage]:
    """The model of a checkpoint on `device` in `dtype`, its recipe, and the stage it was in (attention, RoPE); see
    `read_recipe`."""
    config, stage = read_recipe(checkpoint)
    with torch.device("meta"):
        model = Transformer(config.model)
    model.to_empty(device=device)
    load_model(model, checkpoint)
    model.set_attention(build_attention(stage.attention, config.model.head_width))
    model.set_rope(stage.rope)
    return model.to(dtype).eval(), config, stage
