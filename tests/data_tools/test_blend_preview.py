"""`moba-data blend` shows exactly what training will read."""

from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import yaml

from data_tools.cli import app
from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.stats import preview
from moba_train.config.load import load_config
from moba_train.data.samples import StageData
from moba_train.resolve.run import resolve_unchecked
from tests.commands import run_app
from tests.resolved import stages_of

MODELS = Path(__file__).parents[2] / "configs/models"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Two stages over `a` (300 tokens) and `b` (60), which gets a quarter of the first stage and all of the second."""
    for name, lengths in (("a", [5, 7, 40, 12, 36] * 3), ("b", [20, 5, 35])):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for length in lengths:
                writer.add_document([1] * length)
    a, b = ({"path": str(tmp_path / name), "weight": weight} for name, weight in (("a", 3), ("b", 1)))
    settings = {
        "extends": str(MODELS / "tiny.yaml"),
        "name": "r",
        "run_dir": str(tmp_path / "run"),
        "batch_tokens": 128,
        "attention": {"default": "full"},
        "data": {"train": [a, b]},
        "stages": [
            {"name": "one", "seq_len": 64, "tokens": 1280},
            {"name": "two", "seq_len": 128, "tokens": 256, "train": [b]},
        ],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_shares_repeats_and_padding_are_those_of_the_samples(
    recipe: Path, packing: Literal["concat", "best_fit"]
) -> None:
    config = load_config(recipe, [f"data.packing={packing}"])
    run = resolve_unchecked(config)
    one_a, one_b, two_b = preview(run.samples, run.stages)
    assert [(use.stage, Path(use.source).name) for use in (one_a, one_b, two_b)] == [
        ("one", "a"),
        ("one", "b"),
        ("two", "b"),
    ]
    assert (one_a.tokens, one_a.share, one_b.share, two_b.share) == (960, 0.75, 0.25, 1.0)
    stage = stages_of(config)[0]
    data = StageData(stage.sources, 64, 20, config.seed, {}, config.model.vocab_size, packing)
    read: Counter[str] = Counter()
    for sample in map(data.sample, range(20)):
        for part in sample.parts:
            read[part.source] += part.stop - part.start
    assert one_b.epochs_so_far + two_b.epochs == pytest.approx(two_b.epochs_so_far)
    if packing == "concat":
        assert (one_a.epochs, one_b.epochs) == (read[one_a.source] / 300, read[one_b.source] / 60)
        assert one_a.padding == 0
    else:
        # Up to one group, here one epoch, may be left unread.
        assert read[one_a.source] / 300 <= one_a.epochs <= read[one_a.source] / 300 + 1
        assert one_a.padding == pytest.approx(1 - read[one_a.source] / 960, abs=0.05)


def test_the_command_prints_the_shares(recipe: Path) -> None:
    result = run_app(app, "blend", recipe, "stages.1.tokens=1280")
    assert "75.00%" in result.output
    table = result.output[result.output.index("up to") :]
    # Stage one reads documents of at most 8, 16 and 64 tokens of a (12 : 12 : 76) and of 8 and 64 of b (5 : 55).
    rows = {words[0]: words[1:] for line in table.splitlines() if (words := line.replace("│", " ").split())}
    assert (rows["16"], rows["32"]) == (["9.0%", "0.0%"], ["8.4%", "33.3%"])
    result = run_app(app, "blend", recipe, "data.train.0.path=nowhere", code=2)
    assert "no file nowhere.bin" in result.output
