"""The training program, started by torchrun on every rank:

torchrun --nproc-per-node 8 -m moba_train.train RECIPE.yaml key.path=value ...
"""

from moba_train.errors import leave_if_refused, print_error
from moba_train.run.stop import (
    BEFORE_TRAINING,
    StoppedBeforeTrainingError,
    StopRequest,
    listen,
    listening,
    report_stopped,
)
from moba_train.terminal import outlast_output, safe_terminal

if __name__ == "__main__":
    outlast_output()
    listen()  # before the imports below, which take seconds
    leave_if_refused()

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from moba_train.config.load import dump_config, load_config
from moba_train.config.mesh import WorldSize
from moba_train.errors import LaunchError, UserError, named_ranks
from moba_train.health.watch import stalls_folder
from moba_train.memory.devices import local_device, weakest
from moba_train.parallel.failures import end_with_launcher, was_waiting
from moba_train.parallel.run_lock import run_folder_lock
from moba_train.parallel.world import World, any_rank, gather_over_ranks, joined_world, refuse_everywhere
from moba_train.resolve.recipe import resolve
from moba_train.resolve.run import ResolvedRun
from moba_train.resolve.warnings import print_recipe_warnings
from moba_train.run.determinism import deterministic
from moba_train.run.progress import describe_finished
from moba_train.run.summary import summarize
from moba_train.run.trainer import Trainer

SIGNALS_APART_S = 1.0
"""torchrun passes a signal on to one rank after the other; one that ends at once may be seen before the signal is."""


def main(arguments: list[str] | None = None) -> int:
    """Train a recipe. Returns the exit code: 0 if training ended or stopped as asked, else that of the UserError."""
    with listening() as stop, safe_terminal():
        return _run_or_stop(arguments, stop)


def _run_or_stop(arguments: list[str] | None, stop: StopRequest) -> int:
    """`_run`, where an end in the middle of the set-up that was asked for is no error."""
    try:
        return _run(arguments, stop)
    except Exception as error:
        left_by_others = was_waiting(error) and not stop.training and stop.wait(SIGNALS_APART_S)
        if not isinstance(error, StoppedBeforeTrainingError) and not left_by_others:
            raise
        report_stopped()
        if int(os.environ.get("RANK", 0)) == 0:
            print(BEFORE_TRAINING, flush=True)
        return 0


def _run(arguments: list[str] | None, stop: StopRequest) -> int:
    parser = _Parser(prog="python -m moba_train.train", description=__doc__)
    parser.add_argument("recipe", help="YAML recipe, or the name of a packaged one")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that win over the recipe's")
    parser.add_argument(
        "--stop-at-step",
        type=_positive,
        metavar="STEP",
        help="save and exit with code 0 after this number of optimizer steps, counted over the whole run",
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="begin at step 0 if no checkpoint is found, even where the metrics say that the run has had one",
    )
    parser.add_argument("--verbose", action="store_true", help="print the resolved recipe, with all its values")
    end_with_launcher()
    rank = int(os.environ.get("RANK", 0))
    logging.basicConfig(level=logging.WARNING, format=f"[rank {rank}] %(levelname)s %(message)s")
    try:
        try:
            given = parser.parse_intermixed_args(arguments)
            config = load_config(given.recipe, given.overrides)
            size = WorldSize(int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            device = local_device(int(os.environ.get("LOCAL_RANK", 0)), size.ranks_per_node)
            run = resolve(config, size, device, check_files=True)
        except UserError as error:
            print_error(error)
            return refuse_everywhere(error)
        stalls = stalls_folder(Path(config.run_dir))
        timeout = timedelta(seconds=config.parallel.timeout)
        with deterministic(config.deterministic), joined_world(timeout, stalls) as world:
            stop.joined()
            digest = sha256(dump_config(config).encode()).digest()
            devices, recipes = zip(*gather_over_ranks((device, digest)), strict=True)
            refuse_other_recipes(recipes)
            least = weakest(devices)
            if least != device:
                run = run.on(size, least)
            if world.is_main:
                if given.verbose:
                    print(f"resolved recipe:\n{run.recipe}", flush=True)
                print(summarize(run), flush=True)
                print_recipe_warnings(run)
            _train(run, world, given.stop_at_step, given.from_scratch, stop)
    except UserError as error:
        stop.failed()
        print_error(error)
        if stop.training or error.may_pass:
            return error.exit_code
        return refuse_everywhere(error)  # of the set-up: of the same files, by the same recipe
    return 0


def refuse_other_recipes(recipes: Sequence[bytes]) -> None:
    """Raise LaunchError if the recipes of the ranks, or their digests, differ: a model would learn by several."""
    if others := [rank for rank, recipe in enumerate(recipes) if recipe != recipes[0]]:
        who = named_ranks(others)
        raise LaunchError(
            f"{who}: given another recipe or other overrides than rank 0; allowed: the same on every node"
        )


class _Parser(argparse.ArgumentParser):
    """Raises LaunchError for wrong arguments, which every rank would print otherwise."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message} (`{self.prog} --help` lists the arguments)")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a step of the run, 1 or more")
    return int(text)


def _train(
    run: ResolvedRun,
    world: World,
    stop_at_step: int | None,
    from_scratch: bool,
    stop: StopRequest,
) -> None:
    if any_rank(stop.requested):
        raise StoppedBeforeTrainingError
    with run_folder_lock(run.folders.run, world) as run_lock:
        trainer = Trainer(run, world, run_lock, stop_at_step, from_scratch, stop)
        step_before = trainer.progress.step
        finished = trainer.train()
    if stop.requested and not finished:
        report_stopped()
    if not world.is_main:
        return
    if finished and trainer.progress.step == step_before:
        print(describe_finished(trainer.progress, trainer.resolved.stages, run.folders.run), flush=True)
    elif not finished:
        step = trainer.progress.step
        due = stop_at_step is not None and step >= stop_at_step
        again = f"the same command without --stop-at-step {stop_at_step}" if due else "the same command"
        then = f"{again} continues from here" if run.memory.saves else "nothing is saved, as checkpoint.every is null"
        print(f"stopped as asked after step {step}; {then}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
