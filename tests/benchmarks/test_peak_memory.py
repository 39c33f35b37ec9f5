"""What is alive at the peak of a trace of torch's allocator, by where it was allocated."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peak_memory import GIB, Site, at_peak, report
from moba_train.memory.moments import MEMORY_PARTS


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


BLOCK = [
    frame("/x/torch/_ops.py", 1, "__call__"),
    frame("/tmp/torchinductor_root/ab/cabc.py", 40, "call"),
    frame("/x/moba_train/model/transformer.py", 7, "forward"),
]
LOSS = [frame("/x/site-packages/moba_train/model/loss.py", 3, "chunk_loss")]
ELSEWHERE = [frame("/x/torch/nn/functional.py", 9, "pad")]


def alloc(address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "frames": frames}


def free(address: int) -> dict[str, Any]:
    return {"action": "free_completed", "addr": address}


TRACE = [
    alloc(1, 100, LOSS),
    alloc(2, 10, BLOCK),
    free(1),
    {"action": "free_requested", "addr": 2},  # a stream may still use it
    alloc(1, 60, BLOCK),  # the same address once more
    alloc(3, 50, ELSEWHERE),
    {"action": "segment_map", "addr": 9, "size": 999},
    free(2),
    alloc(4, 5, LOSS),
    free(7),  # allocated before the recording
]


def test_sites_at_the_peak() -> None:
    assert at_peak(TRACE) == [
        Site("compiled/:40 call < model/transformer.py:7 forward", 70, 2),
        Site("functional.py:9", 50, 1),
    ]


def test_the_report_has_the_plan_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = dict.fromkeys(MEMORY_PARTS, GIB) | {"moment": "loss", "host_optimizer": 0}
    arguments = argparse.Namespace(row="8K:full", output=tmp_path / "out.json")
    report(TRACE, planned, "CUDA out of memory", arguments)
    results = json.loads(arguments.output.read_text())["results"]
    assert results["peak_bytes"] == 120
    assert results["ended"] == "CUDA out of memory"
    assert results["sites"][0]["size"] == 70
    printed = capsys.readouterr().out
    assert f"predicted: {len(MEMORY_PARTS)}.00 (loss: parameters 1.00" in printed
    assert "| 0.00 | 2 | compiled/:40 call < model/transformer.py:7 forward |" in printed
