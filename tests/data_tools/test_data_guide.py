"""docs/data.md: every command runs, in its order, and the recipe it ends with trains on what they made."""

import gzip
import json
import re
import shlex
from pathlib import Path

import pytest
from prose import prose
from typer.testing import CliRunner

from data_tools.cli import app
from moba_train.config.load import load_config
from moba_train.config.stages import resolve_stages
from moba_train.config.validate import validate
from moba_train.data.samples import StageData

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "data.md").read_text()


def test_every_command_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In miniature: the vocabulary is smaller."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(120):
        (tmp_path / "text" / f"{number}.py").write_text(prose(number, 20_000 if number % 20 == 0 else 500))
    lines = [json.dumps({"text": prose(number, 30 + 40 * number)}) for number in range(60)]
    (tmp_path / "web.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, "{bad"]).encode()))
    (recipe,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(recipe.replace("configs/models", str(ROOT / "configs" / "models")))

    blocks = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    commands = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert len(commands) >= 7
    for command in commands:
        program, *arguments = shlex.split(command.replace("32000", "320"))
        assert program == "moba-data"
        workers = ["--workers", "1"] if arguments[0] == "tokenize" else []
        result = CliRunner().invoke(app, [*arguments, *workers])
        assert result.exit_code == 0, f"{command}\n{result.output}"
    assert (tmp_path / "web.skipped.txt").read_text().startswith("web.jsonl.gz:61: ")
    assert (tmp_path / "lengths.png").stat().st_size > 1000

    config = load_config(tmp_path / "recipe.yaml")
    validate(config, world_size=1, check_files=True)
    for stage in resolve_stages(config):
        data = StageData(stage.sources, stage.seq_len, 8, config.seed, {}, config.model.vocab_size, config.data.packing)
        samples = [data.sample(index) for index in range(8)]
        assert all(sum(sample.lengths) == stage.seq_len for sample in samples)
        assert any(sample.padding for sample in samples)


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)]+)\)", GUIDE))
def test_links_of_the_guide_lead_somewhere(path: str) -> None:
    assert (ROOT / "docs" / path).exists()
