"""A profile of a few steps names what the reader looks for; the other steps pay nothing."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from moba_train.config.telemetry import TelemetryConfig
from moba_train.health.watch import Watch
from moba_train.model.block import Block
from moba_train.telemetry.sinks import describe_sinks, make_telemetry
from moba_train.telemetry.telemetry import SinkRun, Telemetry
from moba_train.tools.sinks.profile import ProfileOptions, ProfileSink
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks


def names_in(path: Path) -> list[str]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X"]


def test_the_trace_has_steps_stages_phases_layers_attention_and_communication(
    run: Run, ranks: Ranks, finished_run: Run
) -> None:
    """Over the boundary of two stages, of the rank that was asked for; losses are those of a run without a profile."""
    run.recipe["telemetry"]["profile"] = {"steps": [6, 7], "ranks": [1]}
    ranks.train(run, 2, "--stop-at-step", "8")
    (path,) = (run.run_dir / "profile").iterdir()
    assert path.name == "steps_6-7_rank_1.json.gz"
    names = names_in(path)
    for step in ("step 6, stage short", "step 7, stage long"):
        assert names.count(step) == 1
    assert "step 8, stage long" not in names
    assert names.count("forward and backward") == names.count("update") == 2
    assert names.count("layer 0, full") == names.count("layer 1, full") - names.count("layer 0, moba") > 0
    assert names.count("layer 0, moba") > 0
    assert "layer 1, moba" not in names
    # One more forward pass for each layer in the evaluation after step 6.
    assert names.count("moba_train::attention") > names.count("moba_train::attention_backward") > 0
    assert {"gloo:all_gather", "FSDP::all_gather (blocks.0)", "FSDP::post_backward_reduce (blocks.0)"} <= {*names}
    assert run.losses() == finished_run.losses()[:8]


def test_what_is_not_profiled_pays_nothing(run: Run, tmp_path: Path) -> None:
    """Outside of the steps no method is wrapped, and a step is asked once for a microsecond."""
    call, phase = Block.__call__, Watch.phase
    sink = ProfileSink(ProfileOptions(steps=(3, 4), memory=True), tmp_path, 0)
    telemetry = Telemetry([sink])
    telemetry.begin_step(2)
    assert (Block.__call__, Watch.phase) == (call, phase)
    telemetry.begin_step(3)
    assert Block.__call__ != call
    assert Watch.phase != phase
    kept = torch.ones(1000)
    telemetry.begin_step(5)
    assert (Block.__call__, Watch.phase) == (call, phase)
    assert "__call__" not in vars(Block)
    (path,) = tmp_path.iterdir()
    assert "step 3, stage " in names_in(path)
    assert "[memory]" in gzip.decompress(path.read_bytes()).decode()
    assert kept.sum() == 1000
    best = min(_seconds(telemetry) for _ in range(5))
    assert best < 20e-6, "a hundredth of a step of 2 ms"


def _seconds(telemetry: Telemetry) -> float:
    began = time.perf_counter()
    for step in range(6, 1006):
        telemetry.begin_step(step)
    return (time.perf_counter() - began) / 1000


def test_a_run_that_ends_within_the_steps_leaves_its_profile(run: Run) -> None:
    run.recipe["telemetry"]["profile"] = {"steps": [2, 50]}
    assert run.train_here("--stop-at-step", "3") == 0
    assert [path.name for path in (run.run_dir / "profile").iterdir()] == ["steps_2-50_rank_0.json.gz"]
    assert "__call__" not in vars(Block)


@pytest.mark.parametrize("back_to", [1, 3])
def test_a_rollback_ends_the_profile(tmp_path: Path, back_to: int) -> None:
    """The process would end by a signal where a profile begins again that has not ended."""
    sink = ProfileSink(ProfileOptions(steps=(3, 5)), tmp_path, 0)
    for step in (1, 2, 3, 4, *range(back_to, 7)):
        sink.begin_step(step, "only")
        if step < 3:
            assert "__call__" not in vars(Block)
    (path,) = tmp_path.iterdir()
    assert "step 4, stage only" in names_in(path)
    assert "step 5, stage only" not in names_in(path)


def test_a_profile_that_cannot_be_written_is_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.recipe["telemetry"]["profile"] = {"steps": [1, 1]}
    run.run_dir.mkdir()
    (run.run_dir / "profile").write_text("in its place")
    assert run.train_here("--stop-at-step", "2") == 0
    assert len(run.losses()) == 2
    assert "telemetry.profile: " in caplog.text


def test_ranks_that_the_run_does_not_have_are_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.recipe["telemetry"]["profile"] = {"steps": [1, 2], "ranks": [0, 1, 7]}
    assert run.train_here("--stop-at-step", "1") == 2
    assert "telemetry.profile.ranks: given [1, 7]; allowed: 0 to 0" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [[0, 1], [5, 4], [1, 101], [1], "all"])
def test_steps_that_are_none_are_refused(steps: object) -> None:
    with pytest.raises(ValidationError):
        TelemetryConfig.model_validate({"profile": {"steps": steps}})


def test_the_first_lines_name_the_profile_and_nvtx_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = TelemetryConfig.model_validate({"profile": {"steps": [10, 12], "nvtx": True}, "report": False})
    assert ", profile of steps 10 to 12" in describe_sinks(config)
    assert [*config.member_problems("telemetry")] == [
        "telemetry.profile: given nvtx: true, which needs a GPU; leave it out for a trace"
    ]
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    other = make_telemetry(config, SinkRun(tmp_path / "run", "run", "id", None, 100, {}, rank=3))
    other.close()
    assert not (tmp_path / "run").exists(), "another rank opens nothing else"


@pytest.mark.gpu
@pytest.mark.parametrize("nvtx", [False, True])
def test_a_profile_on_a_gpu_has_kernels_and_a_memory_snapshot(run: Run, nvtx: bool) -> None:
    run.recipe["telemetry"]["profile"] = {"steps": [3, 4], "memory": True, "nvtx": nvtx}
    code, output = run.train_on_gpu(1, "--stop-at-step", "5")
    assert code == 0, output
    folder = run.run_dir / "profile"
    if nvtx:
        assert not folder.exists()
        assert "telemetry.profile" not in output
        return
    assert sorted(path.suffix for path in folder.iterdir()) == [".gz", ".pickle"]
    trace = gzip.decompress((folder / "steps_3-4_rank_0.json.gz").read_bytes()).decode()
    assert '"cat": "kernel"' in trace
    assert "layer 0, full" in trace
    assert (folder / "steps_3-4_rank_0.pickle").stat().st_size > 10_000
