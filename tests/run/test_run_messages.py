"""What a run says about itself: a summary at its beginning, how it stopped, that it is finished, where a spike is."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

from moba_train.errors import LaunchError, UserError
from moba_train.parallel.world import joined_world
from moba_train.run.reports import RunReports
from tests.run.faults import inject, not_a_number
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks

KEPT: list[object] = []


def test_every_save_is_reported_also_where_the_next_one_begins_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a save is read after a step; by then the next save may have ended as well."""
    saves = RunReports.saves
    monkeypatch.setattr(
        RunReports, "saves", lambda self, told: saves(self, told) if self._progress.step == 12 else None
    )
    assert run.train_here() == 0
    complete = [record["message"] for record in run.records("checkpoint") if "checkpoint_save_s" in record]
    assert [text.partition(" is complete")[0] for text in complete] == [
        f"the checkpoint of step {step}" for step in (4, 8, 12)
    ]


def lines_with(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


def test_a_summary_stands_for_the_recipe_which_verbose_prints(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.train_here("--stop-at-step", "1") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:7] == [
        "run test",
        "  model   22.7K parameters (18.6K without embeddings): 2 layers, hidden size 32, 4 heads on 2 kv heads",
        "  stages  short   64 tokens a sequence  6 steps  3.07K tokens  attention 2 full",
        "          long   128 tokens a sequence  6 steps  3.07K tokens  attention 1 moba, 1 full",
        "  mesh    1 rank (CPU)",
        "  tokens  6.14K in 12 steps of 512 tokens",
        f"  folder  {run.run_dir}: config.yaml (every value of the recipe), metrics.jsonl, checkpoints",
    ]
    assert "warn_sigma" not in printed
    assert "stopped as asked after step 1; the same command without --stop-at-step 1 continues from here" in printed
    assert "warning: " not in printed
    never = ("stages.0.evaluate=false", "stages.1.evaluate=false")
    assert run.train_here("--stop-at-step", "2", "--verbose", *never) == 0
    assert "resolved recipe:\nname: test\n" in (printed := capsys.readouterr().out)
    assert "warn_sigma: 6.0" in printed
    assert len(lines_with(printed, "warning: data.validation: given, but no stage evaluates")) == 1


def test_a_finished_run_says_so_and_how_to_go_on(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.train_here() == 0
    assert "already finished" not in capsys.readouterr().out
    metrics = run.records()
    assert run.train_here() == 0
    printed = capsys.readouterr().out
    assert f"already finished: all 12 steps (6,144 tokens) are trained; checkpoints are in {run.run_dir}" in printed
    assert "give the last stage more tokens (stages.1.tokens, 3,072 now) or add a stage" in printed
    assert run.records() == metrics
    assert run.train_here("stages.1.tokens=3584") == 0  # what the message says
    assert [record["step"] for record in run.records()][-2:] == [12, 13]


def test_a_run_without_checkpoints_trains_to_its_end_and_saves_nothing(run: Run) -> None:
    assert run.train_here("checkpoint.every=null") == 0
    assert [record["step"] for record in run.records("metrics")] == list(range(1, 13))
    assert run.records("checkpoint") == []
    assert not list((run.run_dir / "checkpoints").glob("step*"))


def test_an_error_before_the_first_checkpoint_says_what_is_kept_and_what_to_try(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.recipe["telemetry"]["console"] = True
    run.recipe["run_dir"] = str(run.folder / "my run")
    inject(monkeypatch, {1: not_a_number})
    assert run.train_here() == 65
    printed = capsys.readouterr()
    dump = run.run_dir / "spikes" / "step_00000001.json"
    command = f"`moba-train inspect-spike '{run.run_dir}' --step 1` shows {dump}"
    assert printed.err.splitlines()[0].startswith("error: step 1 of stage short: loss nan, gradient norm ")
    assert "there is no checkpoint yet (checkpoint.every is 4), so the same command begins again" in printed.err
    assert "model.init_std (0.02 now)" in printed.err
    assert "so it is not optim.lr" in printed.err
    assert (printed.out + printed.err).count(command) == 1
    assert "checkpoint is step 0" not in printed.err
    assert len(lines_with(printed.out, "loss nan")) == 1, "the alert repeats nothing"


def test_a_spike_names_its_dump_and_the_command_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.recipe["telemetry"]["console"] = True
    run.recipe["health"] = {"spike": {"reaction": "skip_step"}}
    inject(monkeypatch, {3: not_a_number})
    assert run.train_here("--stop-at-step", "4") == 0
    dump = run.run_dir / "spikes" / "step_00000003.json"
    (event,) = run.records("spike")
    assert event["dump"] == str(dump)
    assert dump.exists()
    (line,) = lines_with(capsys.readouterr().out, "inspect-spike")
    assert line.endswith(f"; `moba-train inspect-spike {run.run_dir} --step 3` shows {dump}")


def fail(folder: str, everywhere: bool) -> int:
    """An error of the user on rank 0, or on both; else rank 1 waits for rank 0. Returns 0 if the exit code is 75."""
    from moba_train.errors import print_error

    class BadNodeError(LaunchError):
        exit_code = 75

    rank = os.environ["RANK"]
    with open(Path(folder, f"said{rank}"), "w") as stream, contextlib.redirect_stderr(stream):
        try:
            with joined_world() as world:
                KEPT.append(
                    world.store
                )  # rank 0's process has it here, and must not take it along; torchrun's outlives all
                if rank == "0" or everywhere:
                    raise BadNodeError("no such thing")
                torch.distributed.barrier()
        except UserError as error:
            print_error(error)
            return 0 if error.exit_code == 75 else 1
    return 1


@pytest.mark.parametrize("everywhere", [True, False])
def test_ranks_say_an_error_once_and_one_that_waited_says_nothing(
    tmp_path: Path, ranks: Ranks, everywhere: bool
) -> None:
    ranks.work(fail, [str(tmp_path), everywhere], 2)
    assert (tmp_path / "said0").read_text() == "error: no such thing\n"
    assert (tmp_path / "said1").read_text() == ""
