"""What threads gain for a checkpoint: measured by files for each of them, loaded again."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint_threads import main
from moba_train.checkpoint import files


def test_each_thread_has_a_file_and_all_parts_have_their_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "threads.json"
    size = ["--gib", str(4 / 1024), "--tensor-mib", "1", "--threads", "1", "3", "--repeats", "1"]
    monkeypatch.setattr(files, "PART_BYTES", 2**20)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # it would hold for the tests that follow
    monkeypatch.setattr(sys, "argv", ["checkpoint_threads", *size, "--output", str(output)])
    main()
    results = json.loads(output.read_text())["results"]
    assert [(result["threads"], result["files"], result["gib"]) for result in results] == [
        (1, 1, 4 / 1024),
        (3, 3, 4 / 1024),
    ]
    for result in results:
        for part in ("write", "verify", "read"):
            assert result[f"{part}_gib_per_s"]["median"] > 0
    assert capsys.readouterr().out.count("\n") == 5
