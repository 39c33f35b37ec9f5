"""`moba-train eval`: evaluate a checkpoint outside training, on any number of ranks."""

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from moba_train.checkpoint.recipe import SavedRun, Training, overridden_kinds, saved_training
from moba_train.checkpoint.state import load_model
from moba_train.config.mesh import MeshSizes, allowed_divisors
from moba_train.config.run import ParallelConfig
from moba_train.config.stages import Stage
from moba_train.convert.hf_import import imported_recipe
from moba_train.convert.hf_weights import load_hf_weights
from moba_train.convert.initial_weights import is_hf_folder
from moba_train.errors import DataError, UserError
from moba_train.evals.evaluation import Evaluation, EvaluationContext, untracked
from moba_train.evals.options import EvaluationOptions
from moba_train.evals.progress import tracked
from moba_train.evals.registry import EVALUATIONS, enabled_evaluations, evaluations_named
from moba_train.evals.results import result_json, write_output, write_result
from moba_train.evals.variants import Layers, variants
from moba_train.parallel.activations import set_activations
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.stage import ContextEngines
from moba_train.parallel.world import World, joined_world
from moba_train.planning.activations import local_activations
from moba_train.planning.memory import buffer_memory

logger = logging.getLogger(__name__)


def evaluate_checkpoint(saved: SavedRun, options: EvaluationOptions, echo: Callable[[str], object]) -> None:
    """Run the evaluations that the recipe or the options ask for, with each attention on the same weights, and write
    their results beside the checkpoint.

    saved  the recipe with the options laid over it (validation/evaluated.py)
    echo   gets the lines to print, on the first rank

    Under torchrun all its ranks work together, and the numbers are those of one up to rounding. Raises UserError for
    data or options that do not fit.
    """
    training = training_of(saved)
    attentions = variants(saved.config, saved.stage, options.attention)
    evaluations = _evaluations(saved, options)
    with joined_world() as world:
        if world.is_main and saved.stage.seq_len > training.seq_len:
            logger.warning(
                "Sequences of %d tokens are longer than the %d tokens that the model was trained with: positions "
                "beyond are extrapolated by the stage's RoPE",
                saved.stage.seq_len,
                training.seq_len,
            )
        context = dataclasses.replace(_context(saved, options.cp, attentions, world), trained_length=training.seq_len)
        results = {}
        for evaluation in evaluations:
            results[evaluation.name] = evaluation.run(context)
            if world.is_main:
                for line in results[evaluation.name].table:
                    echo(line)
        if world.is_main:
            content = result_json(saved, training, options, context, results) | {"ranks": world.size}
            write_results(content, saved.path, options.output, echo)
            if options.output is not None:
                for evaluation in evaluations:
                    evaluation.plot({saved.stage.name: results[evaluation.name].data}, options.output)


def training_of(saved: SavedRun) -> Training:
    """What the weights have been through; a Hugging Face model, sequences of the length in its config.json."""
    if is_hf_folder(saved.path):
        return Training(0, None, imported_recipe(saved.path, saved.path).stages[0].seq_len)
    return saved_training(saved.path)


def _evaluations(saved: SavedRun, options: EvaluationOptions) -> list[Evaluation]:
    """The evaluations to run, with their data. Raises DataError where there are none, or one lacks data."""
    config = saved.config
    wanted = enabled_evaluations(config) if options.tasks is None else evaluations_named(options.tasks)
    if not wanted:
        keys = " or ".join(evaluation.key for evaluation in EVALUATIONS)
        raise DataError(f"{saved.path}: its recipe has nothing to evaluate; give --data or --tasks, or set {keys}")
    for evaluation in wanted:
        if not evaluation.enabled(config):
            raise DataError(f"--tasks {evaluation.name}: needs {evaluation.key}; give --data CORPUS, or override it")
    evaluations = [evaluation(config, saved.stage) for evaluation in wanted]
    for ready in evaluations:
        if ready.missing:
            raise DataError(f"{saved.path}: {ready.missing}")
    return evaluations


def _context(saved: SavedRun, cp: int | None, attentions: dict[str, Layers], world: World) -> EvaluationContext:
    """The checkpoint's model with the engines of its stage, on this rank."""
    config = saved.config
    stage, sizes = _laid_out(saved.stage, cp, world.size)
    dims = ParallelDims(sizes, world)
    model = sharded_model(config, dims)
    if is_hf_folder(saved.path):
        load_hf_weights(model, saved.path)
    else:
        load_model(model, saved.path, optional=overridden_kinds(saved))
    model.set_rope(stage.rope)
    engines = ContextEngines(config, dims, partial(buffer_memory, config, world.device))
    data_shard, _ = engines.data_shard(stage, sizes)
    strategy = None
    if data_shard.engine is not None:
        model.set_engines([data_shard.engine] * config.model.layers)
        strategy = data_shard.engine.strategy
    set_activations(model, local_activations(config, stage, sizes, world, strategy).layers, world.device)
    track = tracked if world.is_main else untracked
    return EvaluationContext(model, stage, data_shard, world.device, attentions, track=track)


def _laid_out(stage: Stage, cp: int | None, ranks: int) -> tuple[Stage, MeshSizes]:
    """The stage with its sequences over `cp` ranks, and the mesh: without tensor and pipeline parallelism, which change
    no number."""
    if cp is None:
        cp = stage.parallel.cp if ranks % stage.parallel.cp == 0 else 1
    if ranks % cp:
        given = f"--cp: given {cp}, which does not divide the {ranks} ranks of --gpus"
        raise UserError(f"{given}; {allowed_divisors(ranks)}, or more --gpus")
    # The recipe's transport may not work with another number of ranks or heads.
    unchanged = (cp, 1, 1) == (stage.parallel.cp, stage.parallel.tp, stage.parallel.pp)
    parallel = stage.parallel if unchanged else ParallelConfig(cp=cp)
    return dataclasses.replace(stage, parallel=parallel), MeshSizes(dp_shard=ranks // cp, cp=cp)


def write_results(content: dict[str, Any], path: Path, output: Path | None, echo: Callable[[str], object]) -> None:
    """Write the results beside the checkpoint `path`, and into `output`; models of other programs get no files."""
    if output is not None:
        echo(f"results: {write_output(content, output)}")
    if is_hf_folder(path):
        if output is None:
            echo("results: not written into a Hugging Face folder; give --output FOLDER")
        return
    try:
        echo(f"results: {write_result(content, path)}")
    except OSError as error:  # the run may be another user's
        logger.warning("The results are not written beside the checkpoint: %s; give --output FOLDER", error)
