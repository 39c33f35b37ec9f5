"""The report at the end of a run: written where plotly is, announced and not missed where it is not."""

from pathlib import Path

import pytest

from moba_train.config.telemetry import TelemetryConfig
from moba_train.telemetry.sinks import describe_sinks, make_telemetry
from moba_train.telemetry.telemetry import SinkRun


def files_of_a_run(config: TelemetryConfig, folder: Path) -> set[str]:
    """The files of a run of one step."""
    telemetry = make_telemetry(config, SinkRun(folder, "run", "run-id", None, 100, {}))
    telemetry.log(1, 4096, {"loss": 3.5})
    telemetry.close()
    return {path.name for path in folder.iterdir()}


def test_a_run_that_ends_in_order_has_a_report(tmp_path: Path) -> None:
    config = TelemetryConfig(console=False)
    assert describe_sinks(config).startswith("metrics.jsonl, report.html at the end; off: console, ")
    assert files_of_a_run(config, tmp_path) == {"metrics.jsonl", "report.html"}


def test_an_error_and_a_false_write_none(tmp_path: Path) -> None:
    assert files_of_a_run(TelemetryConfig(console=False, report=False), tmp_path / "without") == {"metrics.jsonl"}
    try:
        raise RuntimeError("out of memory")
    except RuntimeError:
        assert files_of_a_run(TelemetryConfig(console=False), tmp_path / "failed") == {"metrics.jsonl"}


@pytest.fixture
def plain_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the packages of the extras can be found."""
    for module in (
        "moba_train.tools.sinks.tensorboard",
        "moba_train.tools.sinks.wandb",
        "moba_train.tools.report.sink",
    ):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)


def test_a_plain_install_trains_without_wandb_and_plotly_and_says_so(plain_install: None, tmp_path: Path) -> None:
    config = TelemetryConfig()
    assert list(config.member_problems("telemetry")) == []
    assert describe_sinks(config) == (
        "metrics.jsonl, console, no report.html without plotly: pip install 'plotly>=6'; "
        "off: profile, tensorboard, wandb"
    )
    assert files_of_a_run(config, tmp_path) == {"metrics.jsonl"}


def test_a_recipe_that_asks_for_a_report_needs_plotly(plain_install: None) -> None:
    (problem,) = TelemetryConfig(report=True).member_problems("telemetry")
    assert problem == (
        "telemetry.report: given true, but the package plotly is not installed; pip install 'plotly>=6', or set auto"
    )
