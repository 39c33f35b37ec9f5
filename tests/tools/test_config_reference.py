"""The generated reference is up to date, complete, and agrees with the loader."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from moba_train.attention.registry import KINDS
from moba_train.config.explain import section_of, walk
from moba_train.config.load import parse_yaml
from moba_train.config.schema import RunConfig
from moba_train.tools import reference
from tests.forked_program import ForkedProgram


def test_the_committed_files_are_what_the_schema_gives() -> None:
    assert not reference.stale_files(), "run python -m moba_train.tools.reference"


def test_check_exits_1_for_a_stale_file_and_writing_updates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["reference", "--check"])
    assert reference.main() == 1
    assert "config.md is stale" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["reference"])
    assert reference.main() == 0
    monkeypatch.setattr(sys, "argv", ["reference", "--check"])
    assert reference.main() == 0


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    program = ForkedProgram(["-m", "moba_train.tools.reference", "--check"], tmp_path / "output")
    program.wait()
    assert program.returncode == 0


def test_every_key_is_documented_with_a_meaning() -> None:
    text = reference.reference()
    for path, field in walk(RunConfig):
        name = path.rpartition(".")[2]
        assert f"| `{name}` |" in text, path
        assert field.description or section_of(field.annotation), f"{path} has no description"
    for link in re.findall(r"\]\(#([^)]*)\)", text):
        assert re.search(rf"^## `?{re.escape(link)}", re.sub(r"[.\[\]]", "", text), re.MULTILINE), link
    assert all(f"| `{kind}` | [section](#attention" in text for kind in KINDS)  # kinds with equal options share one


def test_the_examples_of_the_sections_are_one_recipe_that_works() -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 2}
    recipe: dict[str, Any] = {"name": "examples", "run_dir": "runs/examples", "model": shape, "batch_tokens": "2M"}
    sections = reference.reference().split("\n## ")[1:-1]
    examples = [(part.partition("`")[2], part.partition("```yaml\n")[2].partition("```")[0]) for part in sections]
    examples = [(re.split(r"[`\[]", heading)[0], example) for heading, example in examples if example]
    assert {"data", "optim", "stages", "parallel", "checkpoint", "evaluation"} <= {section for section, _ in examples}
    for section, example in examples:
        read = parse_yaml(example, section)
        assert list(read) == [section]
        recipe |= read
    assert RunConfig.model_validate(recipe).stages[1].seq_len == 128 * 1024


@pytest.mark.parametrize(("text", "fits"), [("128K", True), ("1.5M", True), ("12Q", False), ("", False)])
def test_the_json_schema_takes_numbers_with_suffixes(text: str, fits: bool) -> None:
    schema = json.loads(reference.json_schema())
    options = schema["properties"]["batch_tokens"]["anyOf"]
    pattern = next(option["pattern"] for option in options if option["type"] == "string")
    assert bool(re.search(pattern, text)) is fits


def test_the_json_schema_knows_extends_and_demands_nothing_a_base_file_may_bring() -> None:
    schema = json.loads(reference.json_schema())
    assert "extends" in schema["properties"]
    assert "required" not in schema
    assert schema["additionalProperties"] is False
