"""The recipe selects the sinks."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from moba_train import __version__, environment
from moba_train.config.schema import RunConfig
from moba_train.config.telemetry import TelemetryConfig
from moba_train.telemetry.sinks import describe_sinks, make_telemetry, sink_problems
from moba_train.telemetry.telemetry import SinkRun

RECIPE = {
    "name": "run",
    "run_dir": "unused",
    "model": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
    },
    "data": {"train": [{"path": "corpus"}]},
    "batch_tokens": 4096,
    "stages": [{"name": "short", "seq_len": 4096, "tokens": 1000000}],
}


@pytest.mark.parametrize(
    ("section", "console", "files"),
    [
        ({"console": False, "report": False}, False, {"metrics.jsonl"}),
        ({"tensorboard": True, "report": False}, True, {"metrics.jsonl", "tensorboard"}),
    ],
)
def test_the_sinks_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], section: dict[str, Any], console: bool, files: set[str]
) -> None:
    run_dir: Path = tmp_path / "run"
    config = RunConfig.model_validate(RECIPE | {"telemetry": section})
    telemetry = make_telemetry(config.telemetry, SinkRun(run_dir, "run", "run-id", None, 100, {}))
    telemetry.log(1, 4096, {"loss": 3.5})
    telemetry.close()
    assert {path.name for path in run_dir.iterdir()} == files
    assert ("loss 3.5000" in capsys.readouterr().out) == console


def test_a_sink_without_its_package_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("moba_train.telemetry.sinks", "moba_train.tools.sinks.wandb"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    assert list(sink_problems(TelemetryConfig(report=False))) == []
    asked = TelemetryConfig.model_validate({"tensorboard": True, "report": False, "wandb": {"mode": "offline"}})
    problems = sorted(sink_problems(asked))
    assert [problem.split(":")[0] for problem in problems] == ["telemetry.tensorboard", "telemetry.wandb"]
    for problem in problems:
        extra = problem.split(":")[0].removeprefix("telemetry.")
        assert f'is not installed; pip install "moba-train[{extra}]"' in problem


def test_the_first_lines_of_a_run_say_where_it_is_recorded() -> None:
    config = TelemetryConfig.model_validate({"report": False, "wandb": {"mode": "offline"}})
    assert describe_sinks(config).startswith("metrics.jsonl, console, wandb offline; off: ")
    assert "tensorboard" in describe_sinks(config).partition("off: ")[2]


def test_the_former_name_of_the_report_is_read() -> None:
    """Recipes in checkpoints of before 30 November 2026 have it."""
    assert TelemetryConfig.model_validate({"plots": True}) == TelemetryConfig()
    assert TelemetryConfig.model_validate({"plots": False}).report is False


def test_the_code_is_named_by_its_commit_or_by_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], check=True, capture_output=True)

    source = tmp_path / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(environment, "_PACKAGE", tmp_path)
    look = environment.code_version.__wrapped__
    git("init")
    assert look() == {"version": __version__}, "there is a repository, but it does not hold the package"
    git("add", "__init__.py")
    git("commit", "-m", "first")
    assert look().keys() == {"version", "commit", "dirty"}
    assert not look()["dirty"]
    source.write_text("changed = True\n")
    assert look()["dirty"]
