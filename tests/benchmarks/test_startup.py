"""`benchmarks.startup` starts each row twice with caches of its own, the first time with empty ones."""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import startup, training
from benchmarks.training_rows import Row, parse_row

TRAINER = """
import json, os, pathlib, sys, time
caches = [pathlib.Path(os.environ[name]) for name in {caches}]
warm = all(cache.is_dir() for cache in caches)
for cache in caches:
    cache.mkdir(parents=True, exist_ok=True)
records = [
    dict(step=n, type="metrics", time=time.time(), loss=1.0, step_s=1.0 if warm else 9.0, tokens_per_s_per_device=1.0)
    for n in (1, 2)
]
pathlib.Path({metrics!r}).write_text("".join(json.dumps(record) + "\\n" for record in records))
time.sleep(99)
"""


def options(tmp_path: Path, **other: object) -> argparse.Namespace:
    given = {"model": "tiny", "layers": 2, "gpus": 2, "sequences_per_gpu": 1, "rows": [], "repetitions": 2}
    return argparse.Namespace(**given | {"start_seconds": 60.0, "output": tmp_path / "result.json"} | other)


def test_a_row_starts_with_empty_caches_and_again_with_what_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(row: Row, folder: Path, arguments: argparse.Namespace) -> list[str]:
        if row.seq_len == 2048:
            return [sys.executable, "-c", "raise SystemExit('ValueError: broken')"]
        code = TRAINER.format(caches=startup.CACHES, metrics=str(folder / "run" / "metrics.jsonl"))
        return [sys.executable, "-c", code]

    monkeypatch.setattr(training, "_command", command)
    monkeypatch.setenv("TRITON_CACHE_DIR", "theirs")
    monkeypatch.delenv("CUDA_CACHE_PATH", raising=False)
    arguments = options(tmp_path)
    startup.run([parse_row(text, Row()) for text in ("1K:full", "2K:full")], arguments)
    results = json.loads(arguments.output.read_text())["results"]
    for state, first in (("cold", 9.0), ("warm", 1.0)):
        found = results["1K:full"][state]
        assert found["first_step_s"] == {"median": first, "min": first, "max": first, "count": 2}
        assert 0 < found["to_first_step_s"]["min"] < 30
    assert "ValueError: broken" in results["2K:full"]["cold"]["error"]
    assert "| `1K:full` | " in capsys.readouterr().out
    assert os.environ["TRITON_CACHE_DIR"] == "theirs"
    assert "CUDA_CACHE_PATH" not in os.environ
