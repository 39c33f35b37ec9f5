"""Evaluate a checkpoint outside training, on any number of ranks."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from moba_train.checkpoint.recipe import SavedRun
from moba_train.checkpoint.state import load_model
from moba_train.config.mesh import MeshSizes, divisors
from moba_train.config.quantities import format_count
from moba_train.config.run import ParallelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.errors import DataError, UserError
from moba_train.evals.loss import validation_data, validation_loss
from moba_train.evals.position_wise import PositionWiseLoss, describe, position_wise_loss
from moba_train.evals.variants import name_of, variants
from moba_train.model.build import build_attention
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.stage import ContextEngines
from moba_train.parallel.world import World, joined_world
from moba_train.planning.memory import buffer_memory
from moba_train.report.position_plot import draw_position_wise


@dataclass(frozen=True)
class EvaluationOptions:
    """What to evaluate; None is what the recipe says."""

    attention: Literal["full", "moba", "both"] = "both"
    bucket: int | None = None
    """Tokens of the context that are averaged together."""
    sequences: int | None = None
    """Stretches of long documents, for the loss by position."""
    cp: int | None = None
    """Ranks that share a sequence; None: as many as in the checkpoint's stage, or one rank for each sequence where that
    does not divide the ranks."""
    output: Path | None = None
    """Folder for `evaluation.json` and `position_wise.png`."""


def evaluate_checkpoint(saved: SavedRun, options: EvaluationOptions, echo: Callable[[str], object]) -> None:
    """Evaluate a checkpoint: mean validation loss, and the loss by position if the recipe
    or the options ask for it, with each attention on the same weights.

    Under torchrun all its ranks work together, and the numbers are those of one up to rounding. `echo` gets the lines
    to print, on the first rank. Raises UserError for data or options that do not fit.
    """
    checkpoint, config, stage = saved
    if not config.data.validation:
        raise DataError(f"{checkpoint}: its recipe has no data.validation to evaluate on")
    layers = variants(config, stage, options.attention)
    with joined_world() as world:
        evaluation = _evaluate(checkpoint, config, stage, layers, options, world)
        if world.is_main:
            _report(evaluation, stage, options, echo)


def _evaluate(
    checkpoint: Path, config: RunConfig, stage: Stage, layers: dict[str, Any], options: EvaluationOptions, world: World
) -> tuple[dict[str, float], dict[str, PositionWiseLoss]]:
    """Validation loss and loss by position, by the name of the attention."""
    stage, sizes = _laid_out(stage, options.cp, world.size)
    stretches, bucket = _stretches(config, stage, options)
    validation = validation_data(config, stage.seq_len)
    assert validation is not None
    dims = ParallelDims(sizes, world)
    model = sharded_model(config, dims)
    load_model(model, checkpoint)
    model.set_rope(stage.rope)
    engines = ContextEngines(config, dims, partial(buffer_memory, config, world.device))
    share, _ = engines.data_shard(stage, sizes)
    if share.engine is not None:
        model.set_engines([share.engine] * config.model.layers)
    losses, curves = {}, {}
    for name, kinds in layers.items():
        model.set_attention(build_attention(kinds, config.model.head_width))
        losses[name] = validation_loss(model, validation, stage.micro_batch_size, share, world.device)
        if stretches is not None:
            curves[name] = position_wise_loss(model, stretches, bucket, share, world.device)
    return losses, curves


def _laid_out(stage: Stage, cp: int | None, ranks: int) -> tuple[Stage, MeshSizes]:
    """The stage with its sequences over `cp` ranks, and the mesh: without tensor parallelism, of which the numbers know
    nothing."""
    if cp is None:
        cp = stage.parallel.cp if ranks % stage.parallel.cp == 0 else 1
    if ranks % cp:
        raise UserError(f"--cp: given {cp}, which does not divide the {ranks} ranks; {divisors(ranks)}")
    # A transport that the recipe names may not do for another number of ranks or heads.
    same = (cp, 1) == (stage.parallel.cp, stage.parallel.tp)
    parallel = stage.parallel if same else ParallelConfig(cp=cp)
    return dataclasses.replace(stage, parallel=parallel), MeshSizes(dp_shard=ranks // cp, cp=cp)


def _stretches(config: RunConfig, stage: Stage, options: EvaluationOptions) -> tuple[LongDocumentSamples | None, int]:
    wanted = config.evaluation.position_wise
    bucket = options.bucket
    if bucket is None and wanted is not None:
        bucket = wanted.bucket
    if bucket is None:
        return None, 0
    if bucket < 1 or stage.seq_len % bucket:
        raise UserError(f"--bucket: given {bucket}, which does not divide the stage's seq_len {stage.seq_len}")
    sequences = options.sequences or (wanted.sequences if wanted else 32)
    found = LongDocumentSamples(config.data.validation, stage.seq_len, sequences, config.seed, config.model.vocab_size)
    if not len(found):
        raise DataError(f"data.validation: no document is longer than the stage's seq_len {stage.seq_len}")
    return found, bucket


def _report(
    evaluation: tuple[dict[str, float], dict[str, PositionWiseLoss]],
    stage: Stage,
    options: EvaluationOptions,
    echo: Callable[[str], object],
) -> None:
    losses, curves = evaluation
    for name, loss in losses.items():
        echo(f"{name:<24} validation loss {loss:.4f} nats per token")
    own = name_of(stage.attention) if name_of(stage.attention) in curves else next(iter(curves), None)
    detail: dict[str, Any] = {}
    if own is not None:
        text, _, detail = describe(curves, own)
        for line in _table(curves):
            echo(line)
        echo(text)
    if options.output is None:
        return
    options.output.mkdir(parents=True, exist_ok=True)
    content = {"stage": stage.name, "seq_len": stage.seq_len, "validation_loss": losses, "position_wise": detail}
    (options.output / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if detail:
        draw_position_wise({stage.name: detail}, options.output / "position_wise.png")


def _table(curves: dict[str, PositionWiseLoss]) -> list[str]:
    """Loss by position, a line for each bucket."""
    some = next(iter(curves.values()))
    lines = [f"{'tokens':<20}" + "".join(f"{name:>20}" for name in curves)]
    for place in range(some.losses.shape[1]):
        first, last = (format_count(edge, 1024) for edge in (place * some.bucket, (place + 1) * some.bucket))
        cells = [f"{curve.mean[place]:.4f} +- {curve.standard_error[place]:.4f}" for curve in curves.values()]
        lines.append(f"{f'{first} to {last}':<20}" + "".join(f"{cell:>20}" for cell in cells))
    return lines
