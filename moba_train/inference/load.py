"""A trained model on one device, from a checkpoint."""

from pathlib import Path

import torch

from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.state import load_model
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer


def load_trained(
    checkpoint: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Transformer, RunConfig, Stage]:
    """The model of a checkpoint on `device` in `dtype`, its recipe, and the stage it was in (attention, RoPE)."""
    meta = read_meta(checkpoint)
    config = parse_config(meta["config"], f"{checkpoint} (its recipe)")
    stage = resolve_stages(config)[meta["progress"]["stage"]]
    with torch.device("meta"):
        model = Transformer(config.model)
    model.to_empty(device=device)
    load_model(model, checkpoint)
    model.set_attention(build_attention(stage.attention, config.model.head_width))
    model.set_rope(stage.rope)
    return model.to(dtype).eval(), config, stage
