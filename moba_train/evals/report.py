"""Evaluate a checkpoint outside training, on one device."""

from pathlib import Path

from moba_train.attention.full import FullAttention
from moba_train.checkpoint.publish import find_checkpoint
from moba_train.config.attention import LayerAttention
from moba_train.errors import DataError
from moba_train.evals.loss import validation_data, validation_loss
from moba_train.inference.load import load_trained
from moba_train.model.build import build_attention
from moba_train.parallel.fsdp import compute_dtype
from moba_train.parallel.stage import Share
from moba_train.parallel.world import joined_world


def evaluate_checkpoint(path: Path) -> dict[str, float]:
    """Mean validation loss (nats per token) of a checkpoint, or of a run folder's newest one.

    Keys: "as trained", with the attention of the stage the checkpoint is in, and, where that is not full attention
    already, "full attention" on the same weights. Raises DataError when the recipe has no validation data.
    """
    checkpoint = find_checkpoint(path)
    with joined_world() as world:
        model, config, stage = load_trained(checkpoint, world.device)
        data = validation_data(config, stage.seq_len)
        if data is None:
            raise DataError(f"{checkpoint}: its recipe has no data.validation to evaluate on")
        model = model.to(compute_dtype(config, world.device))
        full = [LayerAttention("full", FullAttention.Options())] * config.model.layers
        variants = {"as trained": stage.attention}
        if any(layer.kind != "full" for layer in stage.attention):
            variants["full attention"] = tuple(full)
        losses = {}
        for label, layers in variants.items():
            model.set_attention(build_attention(layers, config.model.head_width))
            losses[label] = validation_loss(model, data, stage.micro_batch_size, Share(), world.device)
        return losses
