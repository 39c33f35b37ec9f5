"""The time that an orderly stop may take is what the run has measured, and the launcher waits for it."""

import os
import signal
import time
from pathlib import Path

import pytest

from moba_train.checkpoint.manifest import read_meta
from moba_train.errors import LAUNCHER_FOLDER
from moba_train.run.stop import (
    DUPLICATE_S,
    ENDED_BY_INTERRUPT,
    STOPPED_CODE,
    UNMEASURED_S,
    StopRequest,
    StopTime,
)
from moba_train.tools.launch.torchrun import SHUTDOWN_TIMEOUT, _stop_limit, _whole_number
from moba_train.tools.launch.torchrun import main as launch_main
from tests.forked_program import ForkedProgram
from tests.run.tiny_run import Run

SLOW_STEPS = """
import time
from moba_train.run.stop import listen
if __name__ == "__main__":
    listen()
import os, sys
from moba_train import train
update = train.Trainer._update
def slowly(self, *arguments):
    open(sys.argv[1] + ".began", "w").close()
    time.sleep(float(os.environ["STEP_S"]))
    update(self, *arguments)
train.Trainer._update = slowly
sys.exit(train.main())
"""

IMPATIENT = """
import sys
from torch.distributed.elastic.multiprocessing.api import PContext
from moba_train.tools.launch import torchrun
close = PContext.close
PContext.close = lambda self, sig=None, timeout=30: close(self, sig, timeout / 30)
sys.exit(torchrun.main(sys.argv[1:]))
"""
"""A launcher whose seconds are 30 times as short: torchrun's 30 s are one."""


def in_its_first_step(run: Run, step_s: float) -> ForkedProgram:
    """An impatient launcher whose rank is inside its first step, which takes that many seconds."""
    recipe = run.write_recipe()
    (run.folder / "impatient.py").write_text(IMPATIENT)
    (run.folder / "slow_steps.py").write_text(SLOW_STEPS)
    rank = [str(run.folder / "slow_steps.py"), str(recipe)]
    command = [str(run.folder / "impatient.py"), "--standalone", "--nproc-per-node", "1", *rank]
    process = ForkedProgram(command, run.folder / "output", **{STOPPED_CODE: "143", "STEP_S": str(step_s)})
    deadline = time.monotonic() + 120
    while not Path(f"{recipe}.began").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_a_step_that_takes_longer_than_torchrun_waits_is_saved_at_sigterm(run: Run) -> None:
    """And a second SIGTERM, as schedulers send, changes nothing. The exit code is the one that is asked for."""
    run.recipe["checkpoint"]["every"] = 100
    process = in_its_first_step(run, 2.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert read_meta(run.newest_checkpoint)["progress"]["step"] == 1


@pytest.mark.slow
def test_the_second_ctrl_c_is_no_stop_that_took_too_long(run: Run) -> None:
    process = in_its_first_step(run, 60)
    process.send_signal(signal.SIGINT)
    time.sleep(DUPLICATE_S + 0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == ENDED_BY_INTERRUPT, output
    assert "asked again: ending at once" in output
    assert "in time" not in output


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        (STOPPED_CODE, "ended", "an exit code, 0 to 255"),
        (STOPPED_CODE, "-1", "an exit code, 0 to 255"),
        (STOPPED_CODE, "256", "an exit code, 0 to 255"),
        (SHUTDOWN_TIMEOUT, "5m", "seconds, 0 to "),
        (SHUTDOWN_TIMEOUT, "90.5", "seconds, 0 to "),
    ],
)
def test_a_variable_of_the_launcher_that_cannot_be_used_is_refused_before_training(
    variable: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("torch.distributed.run.main", lambda arguments: pytest.fail("was started"))
    assert launch_main(["recipe.yaml"]) == 2
    assert f"{variable}: given '{value}'; allowed: {allowed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nproc-per-node", "x"], "options of torchrun: Unsupported nproc_per_node value: x"),
        (["--nproc-per-node", "0"], "given 0; allowed: 1 to "),
        (["--nnodes=1:x"], "options of torchrun: "),
    ],
)
def test_options_that_torchrun_would_end_on_with_a_traceback_are_refused(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.distributed.run.main", lambda arguments: pytest.fail("was started"))
    assert launch_main([*options, "-m", "moba_train.train", "recipe.yaml"]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("error: ")
    assert said in refusal


def test_an_empty_variable_of_the_launcher_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHUTDOWN_TIMEOUT, "")
    assert _whole_number(SHUTDOWN_TIMEOUT, 7, 10, "seconds") == 7
    assert SHUTDOWN_TIMEOUT not in os.environ


def test_the_launcher_is_told_several_times_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_FOLDER, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _stop_limit(30) == 30, "ranks that are not ours get what torchrun gives"
    request = StopRequest()
    times = StopTime(request, timeout_s=600)
    assert _stop_limit(30) == UNMEASURED_S
    times.begin_stage()
    times.step_took(400)  # compiles
    times.save_took(60)
    assert times.news() is None
    times.step_took(145)
    text = times.news()
    assert text is not None
    assert "up to 300 s (a step 145.0 s, a save 60.0 s)" in text
    assert "--signal=B:USR1@300" in text
    assert request.takes_s == 300
    assert _stop_limit(30) == 900
    times.step_took(144)
    times.save_took(1)
    times.batch_took(20)
    assert times.seconds == 300, "the longest step and the longest save count"
    assert times.news() is None
    times.batch_took(200)
    assert "up to 360 s" in (times.news() or "")
    times.begin_stage()
    assert _stop_limit(30) == UNMEASURED_S
    times.step_took(1000)  # compiles for another length
    times.step_took(1)
    assert "up to 180 s" in (times.news() or "")
    assert _stop_limit(30) == 660, "a run that hangs ends by itself after parallel.timeout"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert _stop_limit(30) == 7


def test_a_run_says_how_long_it_takes_to_stop(run: Run) -> None:
    run.recipe["checkpoint"]["every"] = 2
    assert run.train_here("--stop-at-step", "6") == 0
    (record,) = run.records("stop_time")
    assert record["stop_s"] % 30 == 0
    assert f"--signal=B:USR1@{record['stop_s']}" in record["message"]
