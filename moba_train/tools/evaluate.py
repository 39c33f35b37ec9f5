"""`moba-train eval`: evaluate a checkpoint outside training, on any number of ranks, and write the results as JSON.

The results lie in the run's folder, in `RUN/evaluations/`; docs/how-to/evaluate.md describes the file.
"""

import dataclasses
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from moba_train.checkpoint.recipe import run_folder
from moba_train.config.attention import resolve_layers
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.mesh import MeshSizes, allowed_divisors
from moba_train.config.parallel import ParallelConfig
from moba_train.config.stages import Stage
from moba_train.errors import DataError, ForeignFileError, UserError
from moba_train.evals.evaluation import (
    Evaluation,
    EvaluationContext,
    EvaluationResult,
    EvaluationSetting,
    Layers,
    finite,
    untracked,
    variants,
)
from moba_train.evals.registry import EVALUATIONS, asked_evaluations
from moba_train.memory.devices import local_device, weakest
from moba_train.model.transformer import Transformer
from moba_train.output_files import make_folder, write_new
from moba_train.parallel.activations import set_activations
from moba_train.parallel.data_shard import ContextEngines
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.stage_strategy import stage_strategy
from moba_train.parallel.world import World, broadcast, gather_over_ranks, joined_world
from moba_train.registry import TRANSPORTS
from moba_train.resolve.run import resolve_unchecked, setup_on, stage_layout
from moba_train.tools.convert.hf import imported_recipe
from moba_train.tools.evaluated_recipe import EvaluationOptions, evaluated_setting, evaluations_named
from moba_train.tools.hf.config import is_hf_folder
from moba_train.tools.inference.across_ranks import PromptRanks, prompt_ranks
from moba_train.tools.report.sink import plotly_is_installed
from moba_train.tools.saved_recipe import SavedRun, Training, load_trained, load_weights, saved_training


def tracked(items: Sequence[int], what: str) -> Iterable[int]:
    """The items, with a bar on stderr that disappears when they are done; without one if stderr is no terminal."""
    disabled = not sys.stderr.isatty()
    return track(items, what, console=Console(stderr=True), transient=True, disable=disabled)


FORMAT = 1
FOLDER = "evaluations"
"""Folder of a run with the results of its checkpoints."""


def measured_json(
    saved: SavedRun,
    training: Training,
    options: Mapping[str, Any],
    own: str,
    attentions: Mapping[str, Layers],
    results: Mapping[str, EvaluationResult],
) -> dict[str, Any]:
    """Everything that was measured, by evaluation, and the model that it was measured on, as JSON values.

    options: of the command, as JSON values
    own: name of the attention that numbers are about
    """
    stage = saved.stage
    content = {
        "format": FORMAT,
        "time": time.time(),
        "run": saved.config.name,
        "checkpoint": saved.path.name,
        "step": training.step,
        "tokens": training.tokens,
        "stage": stage.name,
        "stage_index": stage.index,
        "seq_len": stage.seq_len,
        "trained_seq_len": training.seq_len,
        "attention": own,
        "attentions": {name: dict(Counter(layer.kind for layer in layers)) for name, layers in attentions.items()},
        "validation": [source.model_dump(exclude_defaults=True) for source in saved.config.data.validation],
        "tasks": list(results),
        "options": dict(options),
        "numbers": {name: number for result in results.values() for name, number in result.numbers.items()},
    }
    content |= {name: result.data for name, result in results.items()}
    plain: dict[str, Any] = finite(content)
    return plain


def write_result(content: dict[str, Any], checkpoint: Path) -> Path:
    """Write `RUN/evaluations/step_<step>-<seq_len>.json`, with a number at the end if there is such a file. Returns its
    path. Raises OSError when the folder cannot be written to."""
    folder = run_folder(checkpoint) / FOLDER
    make_folder(folder)
    stem = f"step_{content['step']:08d}-{content['seq_len']}"
    return _write_new(content, lambda count: folder / (f"{stem}.json" if count == 1 else f"{stem}-{count}.json"))


def write_output(content: dict[str, Any], folder: Path) -> Path:
    """Write `evaluation.json` into `folder`, and return its path. A file of that name is kept as `evaluation-1.json`,
    or with the next number."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "evaluation.json"
    if path.exists():
        number = next(count for count in range(1, 1 << 30) if not (folder / f"evaluation-{count}.json").exists())
        path.rename(folder / f"evaluation-{number}.json")
    return _write_new(content, lambda count: path if count == 1 else folder / f"evaluation-{count}.json")


def _write_new(content: dict[str, Any], name: Callable[[int], Path]) -> Path:
    """Write `content` to the first of `name(1)`, `name(2)`, ... that no file has."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    count = 1
    while True:
        path = name(count)
        try:
            write_new(path, text)
        except FileExistsError:
            count += 1
        else:
            return path


def load_on_this_machine(saved: SavedRun) -> Transformer:
    """The model on this machine's GPU in bfloat16, or on the CPU in float32, with the stage's RoPE."""
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    return load_trained(saved, device, dtype)


def ranks_of_prompt(saved: SavedRun, world: World) -> PromptRanks | None:
    """All ranks, to share a prompt by the transport of the stage or, with another number of ranks or if that is one
    between nodes, that of `auto`; None if there is one rank. Called on all ranks together."""
    if world.size == 1:
        return None
    stage, _ = _laid_out(saved.stage, world.size, world.size)
    return prompt_ranks(stage_strategy(saved.spec.config, stage, world.ranks_per_node)[0], world)


logger = logging.getLogger(__name__)


def evaluate_checkpoint(saved: SavedRun, options: EvaluationOptions, echo: Callable[[str], object]) -> None:
    """Run the evaluations that the recipe or the options ask for, with each attention on the same weights, and write
    their results into the run's folder.

    saved: the recipe with the options laid over it (tools/evaluated_recipe.py)
    echo: gets the lines to print, on the first rank

    Under torchrun all its ranks work together, and the numbers are those of one rank up to rounding. Raises UserError
    for data or options that do not fit.
    """
    held = saved.held  # by the first rank until all have read it
    with joined_world() as world:
        saved = broadcast(saved._replace(held=None))  # of a run that trains, ranks may have found different ones
        training = training_of(saved)
        setting = evaluated_setting(saved.config, saved.stage.index)
        setting = dataclasses.replace(setting, trained_length=training.seq_len)
        attentions = variants(saved.stage.attention, recipe_layers(saved), options.attention)
        evaluations = _evaluations(saved.config.evaluation, setting, options.tasks)
        if world.is_main:
            warn_of_length(saved.stage.seq_len, training)
        context = _context(saved, options.cp, attentions, world)
        del held
        results: dict[str, EvaluationResult] = {}
        try:
            for evaluation in evaluations:
                results[evaluation.name] = evaluation.run(context)
                if world.is_main:
                    for line in results[evaluation.name].table:
                        echo(line)
        finally:  # a later evaluation that fails takes none of the numbers
            if world.is_main and results:
                content = measured_json(saved, training, options.to_json(), context.own, attentions, results)
                content |= {"ranks": world.size}
                write_results(content, saved.path, options.output, echo)
                if options.output is not None and plotly_is_installed():
                    from moba_train.tools.report.page import write_evaluation  # plotly takes a second to import

                    echo(f"charts: {write_evaluation(content, options.output)}")


def warn_of_length(tokens: int, training: Training) -> None:
    """Warn of sequences of `tokens` tokens if they are longer than those of training."""
    if tokens > training.seq_len:
        logger.warning(
            "Sequences of %d tokens are longer than the %d tokens that the model was trained with: positions beyond "
            "are extrapolated by the stage's RoPE",
            tokens,
            training.seq_len,
        )


def recipe_layers(saved: SavedRun) -> Layers:
    """Attention of every layer by the recipe's own `attention`, over which a stage may lay another one."""
    return resolve_layers(saved.config.attention, saved.config.model.layers)


def training_of(saved: SavedRun) -> Training:
    """Training that the weights have been through. A Hugging Face model counts as trained on sequences of the length in
    its config.json."""
    if is_hf_folder(saved.path):
        return Training(0, None, imported_recipe(saved.path, saved.path).stages[0].seq_len)
    return saved_training(saved.path)


def _evaluations(
    section: EvaluationConfig, setting: EvaluationSetting, tasks: Sequence[str] | None
) -> list[Evaluation[Any]]:
    """Evaluations to run, with their data; `tasks` by name, None: those that the recipe asks for. Raises UserError when
    there are none, or one lacks data."""
    asked = asked_evaluations(section, setting.validation)
    wanted = list(asked) if tasks is None else evaluations_named(tasks)
    if not wanted:
        keys = " or ".join(evaluation.key for evaluation in EVALUATIONS.usable().values())
        raise DataError(f"the checkpoint's recipe has nothing to evaluate; give --data or --tasks, or set {keys}")
    for evaluation in wanted:
        if evaluation not in asked:
            raise DataError(f"--tasks {evaluation.name}: needs {evaluation.key}; give --data CORPUS, or override it")
    evaluations = [evaluation(asked[evaluation], setting) for evaluation in wanted]
    for ready in evaluations:
        if ready.missing:
            raise DataError(ready.missing)
    return evaluations


def _context(saved: SavedRun, cp: int | None, attentions: dict[str, Layers], world: World) -> EvaluationContext:
    """The checkpoint's model with the engines of its stage, on this rank."""
    run = resolve_unchecked(saved.config)
    stage, mesh = _laid_out(saved.stage, cp, world.size)
    dims = ParallelDims(mesh, world)
    device = weakest(gather_over_ranks(local_device(world.device.index or 0, world.ranks_per_node)))
    layers = run.setup.shape.layers
    setup = dataclasses.replace(setup_on(run.setup, device), parts=(layers,))
    # Copy engines need buffers, and gain nothing where nothing is trained.
    parallel = run.parallel.model_copy(update={"fsdp_copy_engines": False})
    model = sharded_model(setup, parallel, dims, run.seed)
    load_weights(model, saved)
    model.set_rope(stage.rope)
    layout = stage_layout(setup, run.memory, stage, mesh, world.ranks_per_node, device)
    data_shard = ContextEngines(dims).data_shard(mesh, layout.strategy)
    if data_shard.engine is not None:
        model.set_engines([data_shard.engine] * layers)
    set_activations(model, layout.activations.layers, world.device)
    track = tracked if world.is_main else untracked
    return EvaluationContext(model, stage, data_shard, world.device, attentions, track=track)


def _laid_out(stage: Stage, cp: int | None, ranks: int) -> tuple[Stage, MeshSizes]:
    """The stage with its sequences over `cp` ranks, and the mesh, without tensor and pipeline parallelism, which change
    no number. Raises UserError for a `cp` that does not divide the ranks."""
    if cp is None:
        cp = stage.parallel.cp if ranks % stage.parallel.cp == 0 else 1
    if ranks % cp:
        given = f"--cp: given {cp}, which does not divide the {ranks} ranks of --gpus"
        raise UserError(f"{given}; {allowed_divisors(ranks)}, or more --gpus")
    # The recipe's transport may not work with another number of ranks, heads or nodes.
    unchanged = (cp, 1, 1) == (stage.parallel.cp, stage.parallel.tp, stage.parallel.pp)
    transport = TRANSPORTS.get(stage.parallel.cp_transport)
    between_nodes = transport is not None and transport.needs_nodes
    parallel = stage.parallel if unchanged and not between_nodes else ParallelConfig(cp=cp)
    return dataclasses.replace(stage, parallel=parallel), MeshSizes(dp_shard=ranks // cp, cp=cp)


def write_results(content: dict[str, Any], path: Path, output: Path | None, echo: Callable[[str], object]) -> None:
    """Write the results into the folder of the checkpoint's run, and into `output`. Models of other programs get no
    files."""
    if output is not None:
        echo(f"results: {write_output(content, output)}")
    if is_hf_folder(path):
        if output is None:
            echo("results: not written into a Hugging Face folder; give --output FOLDER")
        return
    try:
        echo(f"results: {write_result(content, path)}")
    except (OSError, ForeignFileError) as error:  # the run may be another user's
        logger.warning("The results cannot be written into the run's folder: %s; give --output FOLDER", error)
