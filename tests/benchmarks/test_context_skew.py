"""The benchmark of an attention sink: between two processes, and its plot."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from benchmarks import context_skew, context_skew_plot, pictures
from tests.forked import forked


def measure(rank: int, folder: str) -> None:
    """One rank of the program, without a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": Path(folder, "port").read_text()}
    options = ["--transports", "allgather", "dispatch", "--tokens", "64", "--moba", "8/4", "--repeats", "1"]
    sys.argv = ["context_skew.py", *options, "--output", f"{folder}/skew.json"]
    context_skew.main()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skew")
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        (folder / "port").write_text(str(unused.getsockname()[1]))
    forked()
    mp.start_processes(measure, (str(folder),), 2, start_method="forkserver")
    return folder / "skew.json"


@pytest.mark.timeout(120)
def test_a_sink_gives_all_history_to_one_owner(result: Path) -> None:
    found = json.loads(result.read_text())
    assert found["settings"] == {"ranks": 2, "tokens": 64, "moba": "8/4"}
    assert [entry["transport"] for entry in found["results"]] == ["allgather", "dispatch"]
    for entry in found["results"]:
        assert entry["sink"]["blocks_by_owner"] == [1, 0]
        assert 0.6 < entry["uniform"]["blocks_by_owner"][0] < 0.95  # earlier blocks are history for more queries
        assert entry["sink"]["choices_among_first_blocks"] == [1, 1]
        assert all(busy > 0 for routing in context_skew.ROUTINGS for busy in entry[routing]["busy_ms"])


@pytest.mark.timeout(120)
def test_the_plot_and_the_table_have_every_transport(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "skew.svg"
    pictures.draw("context-skew", [result], plot)
    monkeypatch.setattr(sys, "argv", ["context_skew_plot", str(result)])
    context_skew_plot.main()
    drawn = plot.read_text()
    entries = json.loads(result.read_text())["results"]
    for entry in entries:
        assert entry["transport"] in drawn
        assert all(f"{entry[routing]['busy_max_over_mean']:.2f}" in drawn for routing in ("sink", "uniform"))
    assert capsys.readouterr().out.count(f"| {entries[1]['transport']} | contiguous | ") == 1
