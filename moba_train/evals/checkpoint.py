"""`moba-train eval`: evaluate a checkpoint outside training, on any number of ranks."""

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
from moba_train.config.run import ParallelConfig, PositionWiseConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.errors import DataError, UserError
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationResult, untracked
from moba_train.evals.progress import tracked
from moba_train.evals.registry import EVALUATIONS, stage_evaluations
from moba_train.evals.variants import Layers, variants
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.stage import ContextEngines
from moba_train.parallel.world import World, joined_world
from moba_train.planning.memory import buffer_memory


@dataclass(frozen=True)
class EvaluationOptions:
    """What to evaluate; None leaves it to the recipe."""

    attention: Literal["full", "own", "both"] = "both"
    bucket: int | None = None
    """Loss by position: tokens of the context that are averaged together."""
    sequences: int | None = None
    """Loss by position: samples of long documents."""
    cp: int | None = None
    """Ranks that share a sequence; None: as many as in the checkpoint's stage, or one rank for each sequence where that
    does not divide the ranks."""
    output: Path | None = None
    """Folder for `evaluation.json` and plots."""


def evaluate_checkpoint(saved: SavedRun, options: EvaluationOptions, echo: Callable[[str], object]) -> None:
    """Run the evaluations that the recipe or the options ask for, with each attention on the same weights.

    Under torchrun all its ranks work together, and the numbers are those of one up to rounding. `echo` gets the lines
    to print, on the first rank. Raises UserError for data or options that do not fit.
    """
    config = _with_options(saved, options)
    attentions = variants(config, saved.stage, options.attention)
    evaluations = stage_evaluations(config, saved.stage)
    if not evaluations:
        keys = " or ".join(evaluation.key for evaluation in EVALUATIONS)
        raise DataError(f"{saved.path}: its recipe has nothing to evaluate; set {keys}")
    for evaluation in evaluations:
        if evaluation.missing:
            raise DataError(f"{saved.path}: {evaluation.missing}")
    with joined_world() as world:
        context = _context(saved, options.cp, attentions, world)
        results = {}
        for evaluation in evaluations:
            results[evaluation.name] = evaluation.run(context)
            if world.is_main:
                for line in results[evaluation.name].table:
                    echo(line)
        if world.is_main and options.output is not None:
            _write(evaluations, results, saved.stage, options.output)


def _with_options(saved: SavedRun, options: EvaluationOptions) -> RunConfig:
    """The recipe with the options laid over it."""
    given = {"bucket": options.bucket, "sequences": options.sequences}
    wanted = saved.config.evaluation.position_wise
    if wanted is None and options.bucket is None:
        return saved.config
    if options.bucket is not None and (options.bucket < 1 or saved.stage.seq_len % options.bucket):
        raise UserError(
            f"--bucket: given {options.bucket}, which does not divide the stage's seq_len {saved.stage.seq_len}"
        )
    position_wise = (wanted or PositionWiseConfig()).model_copy(
        update={key: value for key, value in given.items() if value is not None}
    )
    evaluation = saved.config.evaluation.model_copy(update={"position_wise": position_wise})
    return saved.config.model_copy(update={"evaluation": evaluation})


def _context(saved: SavedRun, cp: int | None, attentions: dict[str, Layers], world: World) -> EvaluationContext:
    """The checkpoint's model with the engines of its stage, on this rank."""
    config = saved.config
    stage, sizes = _laid_out(saved.stage, cp, world.size)
    dims = ParallelDims(sizes, world)
    model = sharded_model(config, dims)
    load_model(model, saved.path)
    model.set_rope(stage.rope)
    engines = ContextEngines(config, dims, partial(buffer_memory, config, world.device))
    data_shard, _ = engines.data_shard(stage, sizes)
    if data_shard.engine is not None:
        model.set_engines([data_shard.engine] * config.model.layers)
    track = tracked if world.is_main else untracked
    return EvaluationContext(model, stage, data_shard, world.device, attentions, track)


def _laid_out(stage: Stage, cp: int | None, ranks: int) -> tuple[Stage, MeshSizes]:
    """The stage with its sequences over `cp` ranks, and the mesh: without tensor parallelism, it changes no number."""
    if cp is None:
        cp = stage.parallel.cp if ranks % stage.parallel.cp == 0 else 1
    if ranks % cp:
        raise UserError(f"--cp: given {cp}, which does not divide the {ranks} ranks; {divisors(ranks)}")
    # The recipe's transport may not work with another number of ranks or heads.
    unchanged = (cp, 1) == (stage.parallel.cp, stage.parallel.tp)
    parallel = stage.parallel if unchanged else ParallelConfig(cp=cp)
    return dataclasses.replace(stage, parallel=parallel), MeshSizes(dp_shard=ranks // cp, cp=cp)


def _write(evaluations: list[Evaluation], results: dict[str, EvaluationResult], stage: Stage, folder: Path) -> None:
    """Write `evaluation.json` and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"stage": stage.name, "seq_len": stage.seq_len}
    content |= {name: result.data for name, result in results.items()}
    (folder / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for evaluation in evaluations:
        evaluation.plot({stage.name: results[evaluation.name].data}, folder)
