"""wandb receives everything when it works, and costs nothing when it does not; TensorBoard gets the numbers."""

import json
import logging
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moba_train
from moba_train.config.telemetry import TelemetryConfig, WandbConfig
from moba_train.telemetry.sinks import describe_sinks
from moba_train.telemetry.telemetry import Telemetry
from moba_train.tools.sinks import wandb as wandb_sink
from moba_train.tools.sinks.tensorboard import TensorBoardSink
from moba_train.tools.sinks.wandb import WandbHistory, WandbSink
from tests.telemetry.test_factory import files_of_sinks


class FakeRun:
    """The function named `where` of wandb (init, log, alert or finish) runs `behaviour` first."""

    def __init__(self, where: str = "", behaviour: Callable[[], None] = lambda: None) -> None:
        self.where, self.behaviour = where, behaviour
        self.logged: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self.alerts: list[str] = []
        self.finished = False
        self.step = 0

    def reached(self, where: str) -> None:
        if where == self.where:
            self.behaviour()

    def define_metric(self, *args: Any, **kwargs: Any) -> None: ...

    def log(self, values: dict[str, Any], step: int, commit: bool) -> None:
        self.reached("log")
        self.logged.append(values)
        self.steps.append(step)

    def alert(self, title: str, text: str) -> None:
        self.reached("alert")
        self.alerts.append(title)

    def finish(self) -> None:
        self.reached("finish")
        self.finished = True


def install(monkeypatch: pytest.MonkeyPatch, run: FakeRun, api_key: str | None = "key") -> None:
    def init(**kwargs: Any) -> FakeRun:
        run.reached("init")
        return run

    fake = types.ModuleType("wandb")
    contents = {
        "init": init,
        "Settings": dict,
        "Table": lambda columns, data: [list(row) for row in data],
        "api": types.SimpleNamespace(api_key=api_key),
    }
    vars(fake).update(contents)
    monkeypatch.setitem(sys.modules, "wandb", fake)


def sink(folder: Path, mode: str = "offline", **kwargs: Any) -> WandbSink:
    return WandbSink(WandbConfig.model_validate({"mode": mode}), folder, "name", "run-id", {"seed": 0}, **kwargs)


def raise_error() -> None:
    raise RuntimeError("wandb is broken")


MOMENT_S = 10.0
"""Code that waits for a hanging wandb takes longer; code that does not wait takes less, even on a loaded machine."""


def hang() -> None:
    time.sleep(6 * MOMENT_S)


def test_records_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun()
    install(monkeypatch, run)
    telemetry = Telemetry([sink(tmp_path)])
    telemetry.stage = "short"
    telemetry.log(1, 10, {"loss": 3.5})
    telemetry.event(2, 20, "spike", "loss too high", z=7.0)
    telemetry.event(3, 30, "stage", "a message alone is no curve")
    for alert_type in ("spike", "spike", "disk"):
        telemetry.alert(alert_type, "text", alert_type)
    telemetry.close()

    assert run.logged == [
        {"loss": 3.5, "step": 1, "tokens": 10},
        {"z": 7.0, "spikes": [[2, 20, "short", "loss too high"]], "step": 2, "tokens": 20},
    ]
    assert run.alerts == ["spike", "disk"], "one alert per type in ten minutes"
    assert run.finished


def test_a_changed_recipe_is_a_row_of_a_table_also_at_a_step_that_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is of the checkpoint's step, and wandb has the steps after it already. A restart repeats it."""
    run = FakeRun()
    install(monkeypatch, run)
    for value in (0.5, 0.5, 0.25):
        telemetry = Telemetry([sink(tmp_path)])
        telemetry.stage = "short"
        message = f"changed: lr 1.0 -> {value}"
        telemetry.event(3, 30, "recipe", message, changed_keys=1, changes={"optim.lr": [1.0, value]})
        telemetry.log(5, 50, {"loss": 3.5})
        telemetry.close()
    first, second = [3, 30, "short", "changed: lr 1.0 -> 0.5"], [3, 30, "short", "changed: lr 1.0 -> 0.25"]
    assert [row for row in run.logged if "recipe_changes" in row] == [
        {"changed_keys": 1, "recipe_changes": [first], "step": 3, "tokens": 30},
        {"recipe_changes": [first, second], "step": 5, "tokens": 50},
    ]


def test_a_clock_set_back_does_not_silence_alerts(tmp_path: Path) -> None:
    history = WandbHistory(tmp_path / "history.json")
    times = (0.0, 599.0, 601.0, -86400.0, -86399.0)
    assert [history.may_alert("spike", 1e9 + time, 600.0) for time in times] == [True, False, True, True, False]


def test_steps_trained_again_are_drawn_once(tmp_path: Path) -> None:
    path = tmp_path / "history.json"

    def row(record_type: str, step: int) -> dict[str, Any]:
        return history.row({"type": record_type, "step": step, "tokens": 10 * step}, {"value": 1.0})

    history = WandbHistory(path)
    assert all(row("metrics", step) for step in (1, 2, 3))
    history.save()
    history = WandbHistory(path)
    assert not any(row("metrics", step) for step in (2, 3))
    assert row("checkpoint", 3) == {"value": 1.0, "step": 3, "tokens": 30}
    assert row("metrics", 4) == {"value": 1.0, "step": 4, "tokens": 40}


def test_a_history_of_the_version_before_is_read(tmp_path: Path) -> None:
    row = [3, 30, "short", "a spike"]
    written = {"rows": 9, "step": 8, "tokens": 80, "last": {"metrics": 8}, "redone": 0, "spikes": [row], "alerts": {}}
    (tmp_path / "history.json").write_text(json.dumps(written | {"recipe_changes": []}))
    history = WandbHistory(tmp_path / "history.json")
    assert history.sent.rows == 9
    assert history.row({"type": "metrics", "step": 8, "tokens": 80}, {"loss": 1.0}) == {}
    spike = {"type": "spike", "step": 9, "tokens": 90, "stage": "long", "message": "another"}
    assert history.add_to_table(spike) == {"spikes": [row, [9, 90, "long", "another"]]}


def test_a_damaged_history_costs_no_more_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty file is what a power cut may leave."""
    run = FakeRun()
    install(monkeypatch, run)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "history-run-id.json").touch()
    telemetry = Telemetry([sink(tmp_path)])
    telemetry.log(5, 50, {"loss": 3.5})
    telemetry.close()
    assert run.logged == [{"loss": 3.5, "step": 5, "tokens": 50}]
    assert "history-run-id.json cannot be read" in caplog.text


@pytest.mark.parametrize("behaviour", [raise_error, hang])
@pytest.mark.parametrize("where", ["init", "log", "alert", "finish"])
def test_a_failing_wandb_neither_stops_nor_slows_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    behaviour: Callable[..., Any],
) -> None:
    """A record costs the training loop less than 0.2 ms of work, whatever wandb does; closing ends."""
    install(monkeypatch, FakeRun(where, behaviour))
    monkeypatch.setattr(wandb_sink, "QUEUE_SIZE", 10)
    wandb = sink(tmp_path, wait_s=0.5 if behaviour is hang else 5.0)
    telemetry = Telemetry([wandb])
    telemetry.alert("title", "text", "spike")

    start, work = time.perf_counter(), time.thread_time()
    for step in range(1000):
        telemetry.log(step, step, {"loss": 1.0})
    assert time.thread_time() - work < 0.2
    assert time.perf_counter() - start < MOMENT_S
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        telemetry.close()
    assert time.perf_counter() - start < MOMENT_S
    assert ("did not finish" in caplog.text) == (behaviour is hang)
    lost = {  # of 1 alert and 1,000 metrics; not the one that wandb hangs in
        ("init", raise_error): 1001,
        ("init", hang): 1001,
        ("log", raise_error): 1000,
        ("log", hang): 999,
        ("alert", hang): 1000,
    }
    if (where, behaviour) in lost:
        assert f"wandb missed {lost[where, behaviour]} records; metrics.jsonl has them" in caplog.text


def test_online_without_a_key_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = FakeRun()
    install(monkeypatch, run, api_key=None)
    with caplog.at_level(logging.WARNING):
        telemetry = Telemetry([sink(tmp_path, mode="online")])
        telemetry.log(1, 1, {"loss": 1.0})
        telemetry.close()
    assert "no API key" in caplog.text
    assert run.logged == []


def test_a_missing_package_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        sink(tmp_path).close()
    assert len(caplog.records) == 1
    assert "goes on without it" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds wandb's process in /proc")
def test_a_real_wandb_that_hangs_lets_the_finished_process_exit(tmp_path: Path) -> None:
    """SIGSTOP to wandb's own process: the run logs on, gives up on wandb and exits."""
    pytest.importorskip("wandb")
    program = tmp_path / "program.py"
    program.write_text(_HANGING)
    command = [sys.executable, str(program), str(tmp_path)]
    output = tmp_path / "output"
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}  # of other tests
    environment["PYTHONPATH"] = str(Path(moba_train.__file__).parents[1])
    with output.open("w") as stream:  # not a pipe, which wandb's process would hold open
        done = subprocess.run(command, stdout=stream, stderr=stream, timeout=60, env=environment)
    printed = output.read_text()
    assert done.returncode == 0, printed
    assert "did not finish within 1 s" in printed


_HANGING = """
import os, signal, sys, time
from pathlib import Path
from moba_train.config.telemetry import WandbConfig
from moba_train.tools.sinks.wandb import WandbSink

def children():
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        if "wandb" in name and int(rest.split()[1]) == os.getpid():
            found.append(int(stat.parent.name))
    return found

folder = Path(sys.argv[1])
sink = WandbSink(WandbConfig(mode="offline"), folder, "name", "run-id", {}, wait_s=1)
while not list(folder.glob("wandb/history-run-id.json")):
    sink.write({"type": "metrics", "step": 1, "tokens": 1, "loss": 1.0})
    time.sleep(0.1)
stopped = children()
assert stopped
for pid in stopped:
    os.kill(pid, signal.SIGSTOP)
sink.write({"type": "metrics", "step": 2, "tokens": 2, "loss": 1.0})
sink.close()
us = os.getpid()
if os.fork() == 0:  # ends wandb's process once we are gone
    while os.getppid() == us:
        time.sleep(0.1)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)
"""


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    telemetry = Telemetry([TensorBoardSink(tmp_path, None)])
    telemetry.log(1, 4096, {"loss": 3.5})
    telemetry.event(1, 4096, "validation_loss", "loss 3.4", eval_loss=3.4)
    telemetry.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.5)]
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("eval_loss")] == [(1, 3.4)]


def test_a_sink_without_its_package_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for sink in ("tensorboard", "wandb"):
        monkeypatch.setattr(f"moba_train.tools.sinks.{sink}.find_spec", lambda name: None)
    assert list(TelemetryConfig(report=False).member_problems("telemetry")) == []
    asked = TelemetryConfig.model_validate({"tensorboard": True, "report": False, "wandb": {"mode": "offline"}})
    problems = sorted(asked.member_problems("telemetry"))
    assert [problem.split(":")[0] for problem in problems] == ["telemetry.tensorboard", "telemetry.wandb"]
    for problem in problems:
        package = problem.split(":")[0].removeprefix("telemetry.")
        assert f"is not installed; pip install {package}" in problem


def test_the_first_lines_of_a_run_say_where_it_is_recorded() -> None:
    config = TelemetryConfig.model_validate({"report": False, "wandb": {"mode": "offline"}})
    assert describe_sinks(config).startswith("metrics.jsonl, console, wandb offline; off: ")
    assert "tensorboard" in describe_sinks(config).partition("off: ")[2]


def test_tensorboard_writes_its_files_beside_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"tensorboard": True, "report": False}
    assert files_of_sinks(tmp_path, section) == {"metrics.jsonl", "tensorboard"}
    assert "loss 3.5000" in capsys.readouterr().out
