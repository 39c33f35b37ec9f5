"""The program that profiles training steps: a trainer's steps in, a summary for each rank and one report out."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import training_profile
from benchmarks.step_trace import IDLE
from benchmarks.training_profile import Recorder, measure, report, summary
from benchmarks.training_rows import Row, parse_row
from moba_train.run.trainer import Trainer


def _rank(folder: Path, start: float) -> dict[str, object]:
    """The summary of a rank whose only collective began at `start` microseconds."""
    events = [
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 0.0, "dur": 50.0},
        {"cat": "kernel", "name": "gemm", "ts": 50.0, "dur": 150.0},
        {"cat": "kernel", "name": "nccl_all_gather", "ts": start, "dur": 400.0 - start},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 180.0, "dur": 500.0},
    ]
    trace = folder / f"{start}.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    recorder = Recorder(parse_row("8K:full:steps2", Row()), trace, [1.0, 2.0], 0.5, {"num_device_alloc": 3})
    return summary(recorder, set())


def test_the_report_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(row="8K:full:steps2", output=tmp_path / "result.json")
    report([_rank(tmp_path, 200.0), _rank(tmp_path, 300.0)], parse_row(arguments.row, Row()), arguments)
    first, second = json.loads(arguments.output.read_text())["results"]["ranks"]
    assert first["groups_s"] == pytest.approx(
        {"communication, exposed": 100e-6, "matrix products": 75e-6, "copies": 25e-6, IDLE: 0.0}, abs=1e-12
    )
    assert first["waited_for_last_rank_s"] == {"nccl_all_gather": pytest.approx(50e-6)}
    assert second["waited_for_last_rank_s"] == {"nccl_all_gather": 0.0}
    assert second["groups_s"][IDLE] == pytest.approx(50e-6)
    assert second["idle_by_cause_s"] == {"cudaStreamSynchronize in Python, between operators": pytest.approx(50e-6)}
    printed = capsys.readouterr().out
    assert "| collectives waited for the last rank | 0.1 | 0.0 |" in printed
    assert "| num_device_alloc | 3 | 3 |" in printed
    assert "| garbage collection | 250.0 | 250.0 |" in printed


def test_ranks_of_several_groups_have_no_common_order_of_collectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(row="8K:full:tp2:cp2:steps2", output=tmp_path / "result.json")
    ranks = [_rank(tmp_path, 200.0 + 10 * rank) for rank in range(4)]
    report(ranks, parse_row(arguments.row, Row()), arguments)
    found = json.loads(arguments.output.read_text())["results"]["ranks"]
    assert [rank["waited_for_last_rank_s"] for rank in found] == [{}] * 4
    assert "waited for the last rank" not in capsys.readouterr().out


def test_the_trainer_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_profile.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(Trainer, "_step", Trainer._step)  # what the recorder puts in its place is taken back
    row = parse_row("1K:full:eager:warm1:steps2", Row())
    arguments = argparse.Namespace(
        model="tiny", layers=1, row=row.name, sequences_per_gpu=1, output=tmp_path / "out.json"
    )
    measure(row, arguments)
    (rank,) = json.loads(arguments.output.read_text())["results"]["ranks"]
    assert len(rank["step_s"]) == 2
    assert min(rank["step_s"]) > 0
    assert not list(tmp_path.glob("training-profile-*"))
