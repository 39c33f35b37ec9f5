"""docs/how-to/data.md: all commands run in order, and the recipe at the end trains on the corpora they made."""

import gzip
import json
from pathlib import Path

import pytest

from moba_train.config.load import load_config
from moba_train.data.samples import StageData
from tests.data_tools.prose import prose
from tests.guide import ROOT, blocks, commands, run
from tests.resolved import check, stages_of

GUIDE = ROOT / "docs" / "how-to" / "data.md"


def test_every_command_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In miniature: the vocabulary of tokenizer and recipe is smaller."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(120):
        (tmp_path / "text" / f"{number}.py").write_text(prose(number, 20_000 if number % 20 == 0 else 500))
    lines = [json.dumps({"text": prose(number, 30 + 40 * number)}) for number in range(60)]
    (tmp_path / "web.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, "{bad"]).encode()))
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": prose(59, 200)}))
    (recipe,) = blocks(GUIDE, "yaml")
    recipe = recipe.replace("configs/models", str(ROOT / "configs" / "models"))
    (tmp_path / "recipe.yaml").write_text(recipe.replace("32000", "320"))

    guide = [words for block in blocks(GUIDE, "bash") for words in commands(block)]
    assert len(guide) >= 7
    of_long_documents = ("corpus", "excerpt", "data/long/valid")  # needs packages; test_build_corpus.py has its own
    for words in guide:
        if not set(of_long_documents).isdisjoint(words):
            continue
        assert words[0] == "moba-data"
        workers = ["--workers", "1"] if words[1] == "tokenize" else []
        run([word.replace("32000", "320") for word in words], *workers)
    assert (tmp_path / "web.skipped.txt").read_text().startswith("web.jsonl.gz:61: ")
    found = json.loads((tmp_path / "clean.filter.json").read_text())
    assert found["contamination"]["evaluations"]["tasks.jsonl"]["contaminated"] == 1
    assert (tmp_path / "lengths.html").stat().st_size > 1000

    config = load_config(tmp_path / "recipe.yaml")
    assert config.model.vocab_size == 320, "not that of the guide's tokenizer"
    check(config, ranks=1, check_files=True)
    for stage in stages_of(config):
        data = StageData(stage.sources, stage.seq_len, 8, config.seed, {}, config.model.vocab_size, config.data.packing)
        samples = [data.sample(index) for index in range(8)]
        assert all(sum(sample.lengths) == stage.seq_len for sample in samples)
        assert any(sample.padding for sample in samples)
