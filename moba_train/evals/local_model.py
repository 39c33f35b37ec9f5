"""A model to evaluate on one device, from a checkpoint or a Hugging Face folder."""

import torch

from moba_train.checkpoint.recipe import SavedRun
from moba_train.checkpoint.state import load_trained
from moba_train.convert.hf_weights import load_hf_weights
from moba_train.convert.initial_weights import is_hf_folder
from moba_train.model.build import build_model
from moba_train.model.transformer import Transformer


def load_on_this_machine(saved: SavedRun) -> Transformer:
    """The model on this machine's GPU in bfloat16, or on the CPU in float32, with the stage's RoPE."""
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    if not is_hf_folder(saved.path):
        return load_trained(saved, device, dtype)
    with torch.device("meta"):
        model = build_model(saved.config)
    model.to_empty(device=device)
    load_hf_weights(model, saved.path)
    model.set_rope(saved.stage.rope)
    return model.to(dtype).eval()
