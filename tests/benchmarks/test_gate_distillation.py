"""The program that distils gates, at a size for the CPU: both recipes of the repository, shrunk, leave results."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gate_distillation
from data_tools.corpus_writer import IndexedDatasetWriter

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Overrides that make the recipes' model, data and lengths tiny."""
    for name in ("train", "valid"):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for seed in range(6):
                writer.add_document(np.random.default_rng(seed).integers(60, size=500))
    model = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    stages = [
        f"stages.{index}.{key}" for index in range(2) for key in ("seq_len=128", "tokens=512", "micro_batch_size=2")
    ]
    return [
        *(f"model.{key}={value}" for key, value in model.items()),
        "model.init_std=0.3",
        "attention.full_layers=first:1",
        "init_from=null",
        "data.tokenizer=null",
        f"data.train=[{{path: {tmp_path / 'train'}}}]",
        f"data.validation=[{{path: {tmp_path / 'valid'}}}]",
        "batch_tokens=256",
        "optim.schedule.warmup_tokens=256",
        *stages,
        "evaluation.every=2",
        "evaluation.gate_probe.every=2",
        "telemetry.console=false",
    ]


def test_both_recipes_leave_curves(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = [
        "attention.seer.block_size=8",
        "attention.seer.topk=3",
        "attention.msa.block_size=8",
        "attention.msa.topk=3",
    ]
    output = tmp_path / "gates.json"
    paths = ["--runs", str(tmp_path / "runs"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["gate_distillation", *small, *blocks, *paths])
    gate_distillation.main()
    seer, msa = json.loads(output.read_text())["results"]
    assert [seer["recipe"], msa["recipe"]] == ["distill-seer", "distill-msa"]
    for run in (seer, msa):
        assert [stage["name"] for stage in run["stages"]] == ["warmup", "sparse"]
        assert [step["step"] for step in run["steps"]] == list(range(1, 5))
        assert list(run["steps"][0]["auxiliary_loss"]) == ["1"]
        assert [probe["step"] for probe in run["probes"]] == [0, 2, 2, 4]
        assert [layer["layer"] for layer in run["probes"][0]["layers"]] == [1]
        assert {loss["stage"] for loss in run["validation"]} == {"warmup", "sparse"}
    assert not seer["steps"][-1]["auxiliary_loss"]
    assert msa["steps"][-1]["auxiliary_loss"]
