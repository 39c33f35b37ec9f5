"""docs/tutorials/fine-tune-conversations.md is true: its example is made, prepared and trained on as it says."""

import json
import re
from pathlib import Path

import pytest

from moba_train.config.load import load_config
from tests.guide import ROOT, blocks, check_usage, commands, run, shown_lines
from tests.resolved import check

GUIDE = ROOT / "docs" / "tutorials" / "fine-tune-conversations.md"


def test_the_commands_of_the_guide_lead_to_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (example,) = blocks(GUIDE, "python")
    exec(example, {})
    prepare, train, own = map(commands, blocks(GUIDE, "bash"))
    for words in prepare:
        printed = run(words)
        if words[1] == "show":
            (shown,) = blocks(GUIDE, "text")
            assert shown_lines(shown, printed) == []
            call, answer = re.findall(r"\[\[(.*?)\]\]", printed, re.DOTALL)
            assert '{"name": "look_up", "arguments": ' in call
            assert re.fullmatch(r"\w+ is in \w+\.<\|im_end\|>", answer)
    for words in own:
        check_usage(words)
    (words,) = train
    tokens = load_config(words[2]).batch_tokens // 2
    fewer = [f"stages.0.tokens={3 * tokens}", f"batch_tokens={tokens}", "optim.schedule.warmup_tokens=0"]
    run(words, *fewer, "evaluation.sequences=4", "telemetry={log_every: 1, report: false}", "loss_norm=sequence")
    records = [json.loads(line) for line in Path("runs/sft-chat/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["type"] == "metrics"]
    assert len(steps) == 3
    assert steps[-1]["loss"] < steps[0]["loss"]
    for step in steps:
        assert 0 < step["loss_token_fraction"] < 0.3
        assert step["loss_tokens"] == pytest.approx(step["loss_token_fraction"] * tokens)
        assert step["ranks_with_zero_loss_tokens"] == 0
        assert 0 < step["grad_norm_full"] < step["grad_norm"]
        assert 0 < step["grad_norm_moba"] < step["grad_norm"]


def test_the_recipe_for_a_model_of_ones_own_is_valid(tmp_path: Path) -> None:
    (recipe,) = blocks(GUIDE, "yaml")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "recipe.yaml").write_text(recipe)
    check(load_config(tmp_path / "recipe.yaml"), ranks=8)
