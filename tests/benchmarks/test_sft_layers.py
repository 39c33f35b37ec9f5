"""The experiment on full last layers: its documents ask for what they say, and a grid of runs leaves results behind."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import sft_layers
from benchmarks.recall_documents import Recall, conversations, pretraining_documents
from benchmarks.sft_layers import SETUPS, Setup, attention_layers
from benchmarks.sft_training import Documents, gradient_reach
from moba_train.attention.moba.attention import MobaAttention
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer

SIZES = Recall(length=96, facts=3, mentions=2, asked=2, values=2, text_ids=12, keys=8, value_ids=9)


@pytest.fixture
def setup() -> Setup:
    cpu = SETUPS["cpu"]
    model = cpu.model.model_copy(update={"vocab_size": SIZES.vocab_size, "hidden_size": 16, "layers": 2, "heads": 2})
    model = model.model_copy(update={"kv_heads": 1, "intermediate_size": 16})
    moba = MobaAttention.Options(block_size=8, topk=2)
    return dataclasses.replace(cpu, model=model, moba=moba, data=SIZES, batch=2, base_steps=3, steps=2)


def test_every_answer_stands_behind_its_key_in_the_document() -> None:
    tokens, places = conversations(SIZES, 20, torch.Generator().manual_seed(0))
    assert places.tolist() == [91, 92, 94, 95]
    document_end = SIZES.length - SIZES.outline
    for row in tokens.tolist():
        for key_at in (90, 93):
            (said,) = [place for place in range(document_end) if row[place] == row[key_at]]
            assert row[said : said + 3] == row[key_at : key_at + 3]


def test_pretraining_documents_mention_each_fact_as_often_as_they_say() -> None:
    for row in pretraining_documents(SIZES, 20, torch.Generator().manual_seed(0)).tolist():
        keys = [token for token in row if SIZES.text_ids <= token < SIZES.text_ids + SIZES.keys]
        assert sorted(keys.count(key) for key in set(keys)) == [2, 2, 2]


def test_full_attention_reaches_every_token_and_moba_only_selected_blocks(setup: Setup) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = Documents.from_tokens(*conversations(SIZES, 2, generator), 2)
    reach = {}
    for full in ("none", "all"):
        model = Transformer(setup.model)
        initialize_weights(model, 0)
        model.set_attention(attention_layers(setup, full))
        reach[full] = gradient_reach(model, documents)
    assert min(reach["all"]) > 0.95
    assert reach["none"][-1] < 0.6
    assert reach["none"][0] >= reach["none"][-1]


def test_a_grid_leaves_results_and_a_plot(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sft_layers.SETUPS, "cpu", setup)
    monkeypatch.setattr(sft_layers, "HELD_OUT", 2)
    output = tmp_path / "result.json"
    plot = tmp_path / "plot.svg"
    grid = ["--size", "cpu", "--seeds", "2", "--full", "none", "last:1", "--controls", "all"]
    monkeypatch.setattr(sys, "argv", ["sft_layers", *grid, "--output", str(output), "--plot", str(plot)])
    sft_layers.main()
    results = json.loads(output.read_text())["results"]
    assert len(results["runs"]) == 6
    assert [row["seeds"] for row in results["summary"]] == [2, 2, 2]
    assert all(len(row["gradient_norm"]) == 2 for row in results["summary"])
    assert "last:1" in capsys.readouterr().out
    assert "MoBA everywhere" in plot.read_text()

    monkeypatch.setattr(sys, "argv", ["sft_layers", "--size", "cpu", "--minutes", "0", "--output", str(output)])
    sft_layers.main()
    assert "seed 2: out of time after 0 runs" in capsys.readouterr().out
