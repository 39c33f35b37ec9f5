"""`moba-train calibrate` measures what a prediction needs, and `moba-train tune` the layouts that it prefers."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.optim.registry import OPTIMIZERS
from moba_train.tools.cli import app
from moba_train.tools.plan import tune
from moba_train.tools.plan.calibrate import Calibration, calibrate, node_bandwidth
from moba_train.tools.plan.rates import read_rates
from moba_train.tools.plan.render import OWN_LAYOUT
from tests.commands import run_app
from tests.forked import run_processes
from tests.forked_program import run_forked
from tests.run.tiny_run import Run

NOT_TRAINED = {"infllm"}
"""Kinds that have no gradient."""
LARGER_BLOCKS = {"moba_v1", "moba_v05", "moba_window"}
"""Kinds whose default blocks do not fit into the short sequences that are measured on a CPU."""


@pytest.fixture(scope="module")
def rates_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rates of this machine, by the command."""
    file = tmp_path_factory.mktemp("rates") / "rates.json"
    done = run_app(app, "calibrate", "--output", file)
    for part in ("TFLOP/s", "GB/s", "passes over its activations", "update by adamw", f"written: {file}"):
        assert part in done.output, part
    return file


def test_every_kind_and_optimizer_is_measured_or_named_with_the_reason(rates_file: Path) -> None:
    rates = read_rates(rates_file)
    measured = {row.kind for row in rates.attention}
    assert measured == set(KINDS) - NOT_TRAINED - (set() if torch.cuda.is_available() else LARGER_BLOCKS)
    for kind in set(KINDS) - measured:
        assert f"{kind}: " in rates.sources["left out"], kind
    assert rates.update_s.keys() == set(OPTIMIZERS)
    assert rates.note.startswith("measured by moba-train calibrate, 20")
    lengths = {row.tokens for row in rates.attention if row.kind == "full"}
    assert len(lengths) >= 2
    gates = [dict(row.options) for row in rates.attention if row.kind == "msa"]
    assert all({"mode": mode} | every in gates for mode in ("warmup", "sparse") for every in ({}, {"kl_every": 8}))
    for row in rates.attention:
        assert min(row.both_ms, row.forward_ms) > 0, row  # which is longer, a busy machine does not say


def test_kinds_that_others_do_not_depend_on_are_left_out_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.tools.plan.calibrate.MINUTES", 0.0)
    *_, rates = calibrate(lambda line: None)
    assert {row.kind for row in rates.attention} == {"full", "moba"}
    assert "nsa: no time left" in rates.sources["left out"]


def test_an_interrupted_calibration_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of another package can tune its kernels for longer than a batch system waits."""

    def interrupted(self: Calibration, layer: LayerAttention, model: ModelConfig, tokens: int) -> tuple[float, float]:
        if layer.kind == "lightning":
            raise KeyboardInterrupt
        return 0.001, 0.003

    monkeypatch.setattr(Calibration, "_attention_seconds", interrupted)
    output = tmp_path / "rates.json"
    assert CliRunner().invoke(app, ["calibrate", "--output", str(output)]).exit_code == 130
    rates = read_rates(output)
    kinds = [row.kind for row in rates.attention]
    assert {"full", "moba"} < set(kinds)
    assert "lightning" not in kinds
    assert rates.sources["left out"].endswith("all other attention: the calibration was interrupted")


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs no GPU or several")
def test_the_bandwidth_of_links_is_that_of_a_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.multiprocessing, "spawn", run_processes)
    assert node_bandwidth(1, "gloo", 1 << 20) is None
    found = node_bandwidth(2, "nccl" if torch.cuda.is_available() else "gloo", 1 << 20)
    assert found is not None
    assert 1e6 < found < 1e13


@pytest.fixture
def spared_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, layouts are trained by forks."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(tune, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run_forked}))


@pytest.mark.usefixtures("spared_imports")
def test_layouts_are_trained_and_printed_in_the_measured_order(rates_file: Path, corpora: Path, tmp_path: Path) -> None:
    """On two ranks: data, tensor and pipeline parallelism."""
    recipe = Run(tmp_path, corpora).write_recipe()
    results = tmp_path / "layouts.json"
    given = ["--gpus", "2", "--steps", "2", "--rates", str(rates_file), "--output", str(results)]
    done = CliRunner(env={"OMP_NUM_THREADS": "1"}).invoke(app, ["tune", str(recipe), *given])
    assert done.exit_code == 0, done.output
    layouts = json.loads(results.read_text())["layouts"]
    assert len(layouts) == 3
    times = [layout["measured_s"] for layout in layouts]
    assert times == sorted(times)
    assert sorted(layout["predicted_place"] for layout in layouts) == [1, 2, 3]
    for number, layout in enumerate(layouts, start=1):
        assert f"  {number}. {' '.join(layout['arguments']) or OWN_LAYOUT}    # measured " in done.output
        assert [stage["name"] for stage in layout["stages"]] == ["short", "long"]
        assert layout["measured_s"] == pytest.approx(sum(6 * stage["step_s"] for stage in layout["stages"]))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_layouts_of_a_machine_without_a_gpu_need_its_rates(corpora: Path, tmp_path: Path) -> None:
    done = run_app(app, "tune", Run(tmp_path, corpora).write_recipe(), code=2)
    assert "this machine has no GPU; `moba-train calibrate` measures its CPU" in done.stderr


@pytest.mark.usefixtures("spared_imports")
def test_a_layout_that_fails_comes_last_with_what_it_said(
    rates_file: Path, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, corpora)
    broken = tune._shortened
    monkeypatch.setattr(tune, "_shortened", lambda *given: [*broken(*given), "no_such_key=1"])
    given = ["--gpus", "1", "--rates", str(rates_file)]
    done = run_app(app, "tune", run.write_recipe(), *given, code=2)
    assert "no layout could be trained" in done.stderr
    assert "no_such_key: unknown key" in done.stderr


@pytest.mark.parametrize("command", [["calibrate"], ["tune", "quickstart"]])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, command: list[str]
) -> None:
    for output, said in ((tmp_path, "is a folder"), (tmp_path / "none" / "rates.json", "can be written to")):
        done = run_app(app, *command, "--output", output, code=2, env={"COLUMNS": "500"})
        assert said in done.stderr
