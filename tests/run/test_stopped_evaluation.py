"""A step's checkpoint comes before its evaluations, a stop ends them, and a run that resumes has the numbers of one
that was never stopped."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.retention import Evaluated
from moba_train.evals import validation_loss
from moba_train.evals.evaluation import EvaluationStoppedError
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.evaluations import RunEvaluations, StageEvaluations
from moba_train.run.trainer import Trainer
from moba_train.train import main
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks

EVALUATED = 6
"""Step at which the first stage ends, after an evaluation that its criterion reads."""


class CrashedError(Exception):
    pass


def evaluating(folder: Path, corpora: Path, save_every: int) -> Run:
    """A run whose first stage ends early, at step 6, because of its evaluation there."""
    folder.mkdir(exist_ok=True)
    run = Run(folder, corpora)
    run.recipe["checkpoint"]["every"] = save_every
    run.recipe["evaluation"]["every"] = 3
    stage = run.recipe["stages"][0]
    stage["micro_batch_size"] = 2
    stage["until"] = {"metric": "eval_loss", "at_most": 100, "max_tokens": 20 * 512}
    return run


def history(run: Run) -> dict[str, list[tuple[int, Any]]]:
    """What a run has measured and decided, in order."""
    wanted = {"metrics": "loss", "validation_loss": "eval_loss", "stage_exit": "message"}
    return {name: [(record["step"], record[key]) for record in run.records(name)] for name, key in wanted.items()}


def assert_as_if_undisturbed(run: Run, undisturbed: Run) -> None:
    assert history(run) == history(undisturbed)
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)


def crash(*_arguments: Any, **_named: Any) -> None:
    raise CrashedError


def crash_at_second_batch(step_of: Callable[[], int], at: int = EVALUATED) -> Callable[..., Any]:
    """`token_losses` that fails in the second batch of the evaluation at this step."""
    token_losses = validation_loss.token_losses
    batches = iter([True])

    def loss(*arguments: Any) -> Any:
        if step_of() == at and not next(batches, False):
            raise CrashedError
        return token_losses(*arguments)

    return loss


def current_step(run: Run) -> Callable[[], int]:
    return lambda: max((record["step"] for record in run.records()), default=0)


def test_a_checkpoint_comes_before_the_evaluation_of_its_step(tmp_path: Path, corpora: Path) -> None:
    run = evaluating(tmp_path / "run", corpora, save_every=3)
    assert run.train_here("--stop-at-step", "4") == 0
    lines = [line for line in (run.run_dir / "metrics.jsonl").read_text().splitlines() if '"step": 3,' in line]
    saving = next(index for index, line in enumerate(lines) if "saving the checkpoint of step 3" in line)
    evaluated = next(index for index, line in enumerate(lines) if '"validation_loss"' in line)
    assert saving < evaluated


def test_the_last_checkpoint_comes_before_the_last_evaluation_too(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step, 11, is no multiple of checkpoint.every. It is saved once."""
    run.recipe["stages"][1]["tokens"] = 5 * 512
    with monkeypatch.context() as patched:
        patched.setattr(validation_loss, "token_losses", crash_at_second_batch(current_step(run), at=11))
        with pytest.raises(CrashedError):
            run.train_here()
    assert run.newest_checkpoint.name == "step_00000011"
    assert run.train_here() == 0
    saving = [record["step"] for record in run.records("checkpoint") if "checkpoint_stall_s" in record]
    assert saving == [4, 8, 11]
    (loss,) = [record["eval_loss"] for record in run.records("validation_loss") if record["step"] == 11]
    numbers = Evaluated.read(run.run_dir / "checkpoints").numbers(read_meta(run.newest_checkpoint))
    assert numbers == {"eval_loss": loss}
    capsys.readouterr()
    monkeypatch.setattr(RunEvaluations, "_between_batches", crash)
    assert run.train_here() == 0
    assert "already finished" in capsys.readouterr().out


def test_a_finished_run_says_so_where_the_numbers_of_its_last_checkpoint_end_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoint was saved before the evaluation that met the criterion."""
    until = {"metric": "eval_loss", "at_most": 100, "max_tokens": 12 * 512}
    run.recipe["stages"] = [run.recipe["stages"][0] | {"tokens": 4 * 512, "until": until}]
    run.recipe["evaluation"]["every"] = 4
    assert run.train_here() == 0
    assert "already finished" not in capsys.readouterr().out
    assert run.train_here() == 0
    assert "already finished: all 4 steps" in capsys.readouterr().out


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """One rank's run from start to end. Not to be changed."""
    run = evaluating(tmp_path_factory.mktemp("undisturbed") / "run", corpora, save_every=3)
    assert run.train_here() == 0
    return run


@pytest.fixture(scope="module")
def undisturbed_on_two_ranks(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """The run of two ranks. Not to be changed."""
    run = evaluating(tmp_path_factory.mktemp("undisturbed") / "run", corpora, save_every=3)
    ranks.train(run, 2)
    return run


@pytest.mark.parametrize("moment", ["in the evaluation", "after its records", "in the next step"])
def test_a_run_that_dies_around_an_evaluation_has_each_record_once_and_the_same_bits(
    moment: str, tmp_path: Path, corpora: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [step for step, _ in history(undisturbed)["stage_exit"]] == [EVALUATED]

    run = evaluating(tmp_path / "run", corpora, save_every=3)
    with monkeypatch.context() as patched:
        if moment == "in the evaluation":
            patched.setattr(validation_loss, "token_losses", crash_at_second_batch(current_step(run)))
        elif moment == "after its records":
            evaluated = RunCheckpoints.evaluated

            def dies(self: RunCheckpoints, step: int, numbers: Any) -> None:
                crash() if step == EVALUATED else evaluated(self, step, numbers)

            patched.setattr(RunCheckpoints, "evaluated", dies)
        else:
            enter = Trainer._enter

            def dies_in_the_next(self: Trainer, stage: Any, starts: Any) -> Any:
                return crash() if stage.index else enter(self, stage, starts)

            patched.setattr(Trainer, "_enter", dies_in_the_next)
        with pytest.raises(CrashedError):
            run.train_here()
    assert read_meta(run.newest_checkpoint)["progress"]["step"] == EVALUATED
    evaluations: list[int] = []
    between_batches = RunEvaluations._between_batches

    def noting(self: RunEvaluations) -> None:
        evaluations.append(self._progress.step)
        between_batches(self)

    with monkeypatch.context() as patched:
        patched.setattr(RunEvaluations, "_between_batches", noting)
        assert run.train_here() == 0
    assert (EVALUATED in evaluations) == (moment != "in the next step"), "completed evaluations are not run again"
    assert_as_if_undisturbed(run, undisturbed)


def train_with_signal_to_rank_1(recipe: str) -> int:
    """Rank 1 gets SIGTERM in the first batch of the evaluation of step 6."""
    token_losses = validation_loss.token_losses
    run_due = StageEvaluations.run_due
    at: list[int] = []

    def noting(self: StageEvaluations, step: int, tokens: int) -> dict[str, float]:
        at.append(step)
        return run_due(self, step, tokens)

    def signalled(*arguments: Any) -> Any:
        if at[-1] == EVALUATED and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return token_losses(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StageEvaluations, "run_due", noting)
        patched.setattr(validation_loss, "token_losses", signalled)
        return main([recipe])


@pytest.mark.parametrize("save_every", [3, 4])
def test_sigterm_to_one_rank_ends_an_evaluation_on_all_and_it_is_run_when_the_run_resumes(
    save_every: int, tmp_path: Path, corpora: Path, ranks: Ranks, undisturbed_on_two_ranks: Run
) -> None:
    """Whether or not its step has a checkpoint of its own."""
    run = evaluating(tmp_path / "run", corpora, save_every)
    ranks.work(train_with_signal_to_rank_1, [str(run.write_recipe())], 2)
    assert [record["step"] for record in run.records("validation_loss")] == [3]
    progress = read_meta(run.newest_checkpoint)["progress"]
    assert (progress["step"], progress["evaluation_due"]) == (EVALUATED, True)
    ranks.train(run, 2)
    assert_as_if_undisturbed(run, undisturbed_on_two_ranks)


def test_batches_are_timed_one_by_one_and_checkpoints_that_fail_end_an_evaluation_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took: list[float] = []
    request = SimpleNamespace(requested=False)
    stop = SimpleNamespace(request=request, time=SimpleNamespace(batch_took=took.append))
    checkpoints = SimpleNamespace(wants_to_stop=False)
    clock = iter([12.0, 15.0, 16.0, 17.0])
    monkeypatch.setattr("moba_train.run.evaluations.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr("moba_train.run.evaluations.any_rank", bool)
    running = RunEvaluations(
        world=SimpleNamespace(device=torch.device("cpu")),  # type: ignore[arg-type]
        checkpoints=checkpoints,  # type: ignore[arg-type]
        stop=stop,  # type: ignore[arg-type]
        **dict.fromkeys(("section", "metrics", "progress", "telemetry", "watch", "is_recorded")),  # type: ignore[arg-type]
    )
    running._batch_began = 10.0
    for _ in range(2):
        running._between_batches()
    assert took == [2.0, 3.0]
    for asking, name in ((checkpoints, "wants_to_stop"), (request, "requested")):
        with monkeypatch.context() as patched:
            patched.setattr(asking, name, True)
            with pytest.raises(EvaluationStoppedError):
                running._between_batches()


def test_a_finished_run_that_is_started_again_evaluates_nothing(
    undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = history(undisturbed)
    monkeypatch.setattr(RunEvaluations, "_between_batches", crash)
    assert undisturbed.train_here() == 0
    assert history(undisturbed) == before
