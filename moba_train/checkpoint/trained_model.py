"""A trained model on one device, from a checkpoint."""

import torch

from moba_train.checkpoint.recipe import SavedRun, overridden_kinds
from moba_train.checkpoint.state import load_model
from moba_train.model.build import build_attention, build_model
from moba_train.model.transformer import Transformer


def load_trained(saved: SavedRun, device: torch.device, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model of a checkpoint on `device` in `dtype`, with the attention and RoPE of the stage that saved it.

    Raises CheckpointError when the checkpoint is damaged.
    """
    config = saved.config
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device=device)
    load_model(model, saved.path, optional=overridden_kinds(saved))
    model.set_attention(build_attention(saved.stage.attention, config.model.head_width))
    model.set_rope(saved.stage.rope)
    return model.to(dtype).eval()
