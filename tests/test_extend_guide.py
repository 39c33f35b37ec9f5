"""docs/tutorials/extend-a-checkpoint.md: plan prints what it shows, and its commands lead from a downloaded model to
one that transformers runs with MoBA, here with a tiny model and short sequences."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moba_train.config.load import load_config
from tests.data_tools.prose import prose
from tests.guide import ROOT, blocks, check_usage, commands, run, shown_lines
from tests.tools.convert.hf_models import make_hf_model
from tests.tools.convert.test_hf_tokenizer import train_json

GUIDE = ROOT / "docs" / "tutorials" / "extend-a-checkpoint.md"
MODEL = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 64, "layers": 4, "heads": 4, "kv_heads": 2}
SMALLER: dict[str, Any] = {
    **{f"model.{key}": value for key, value in MODEL.items()},
    "model.head_dim": 8,
    "batch_tokens": 1024,
    "optim.schedule.warmup_tokens": 0,
    "attention.moba": {"block_size": 32, "topk": 3},
    "evaluation": {"every": 2, "sequences": 2, "position_wise": {"bucket": 64, "sequences": 2}},
    "telemetry": {"console": False, "report": False},
}
for stage in range(2):
    SMALLER[f"stages.{stage}.seq_len"] = 512
    SMALLER[f"stages.{stage}.tokens"] = 2048
    SMALLER[f"stages.{stage}.parallel.cp"] = 1
    SMALLER[f"stages.{stage}.rope.original_seq_len"] = 128
SMALLER["stages.1.until.max_tokens"] = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, with the recipe, a tiny Qwen3 at the place of the downloaded one, and long documents."""
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("extend")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "recipe.yaml").write_text(blocks(GUIDE, "yaml")[0])
    model = folder / "models" / "Qwen3-0.6B-Base"
    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    shape = {names.get(key, key): value for key, value in MODEL.items()}
    make_hf_model(
        "qwen3",
        model,
        **shape,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
        rms_norm_eps=1e-6,
    )
    train_json(model).rename(model / "tokenizer.json")
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "corpora" / "long").mkdir(parents=True)
    for number in range(12):
        (folder / "corpora" / "long" / f"{number}.txt").write_text(prose(number, 6000))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("COLUMNS", "200")
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # test_resume.py takes C++ code
        yield folder


def test_plan_prints_what_the_page_shows(folder: Path) -> None:
    (plan,) = (words for block in blocks(GUIDE, "bash") for words in commands(block) if words[1] == "plan")
    printed = run(plan, "--no-data")
    (shown,) = blocks(GUIDE, "text")
    assert shown_lines(shown, printed) == []


@pytest.mark.parametrize("section", [1, 2])
def test_other_models_need_what_the_page_says(section: int, folder: Path) -> None:
    """Llama, of one stage, and a mixture of experts."""
    recipe, *changes = map(yaml.safe_load, blocks(GUIDE, "yaml"))
    changed = changes[section - 1]
    text = GUIDE.read_text().split("## The same with ")[section]
    assert changed["extends"] in text
    (folder / "other.yaml").write_text(yaml.safe_dump(recipe | changed))
    printed = run(["moba-train", "plan", "other.yaml", "--gpus", "8", "--gpu", "h200", "--no-data"])
    said = re.search(r"(\S+) hours and (\S+) GiB", text)
    assert said is not None
    assert re.search(rf"^all stages: (at most )?{said[1]} hours$", printed, re.MULTILINE)
    assert f"needs most, {said[2]} GiB" in printed


def test_the_commands_lead_to_a_model_in_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smaller = [f"{key}={json.dumps(value)}" for key, value in SMALLER.items()]
    printed = {}
    for words in (words for block in blocks(GUIDE, "bash") for words in commands(block)):
        if words[0] not in ("moba-train", "moba-data"):
            continue
        check_usage(words)
        if "recipe.yaml" in words:
            words = [*words[:3], *smaller]
        if words[1] == "eval":
            words = [*words[:3], *words[-2:], "evaluation.position_wise.sequences=2"]
        values = {"0.02": "0.3", "128K": "512", "50": "3"}
        here = [values.get(word, word) for word in words]
        printed[words[1]] = run(here, *(["--workers", "1"] if words[1] == "tokenize" else []))
    assert "share of tokens" in printed["stats"]
    assert re.search(r"^tokens +moba\S* +full$", printed["eval"], re.MULTILINE)
    assert Path("runs/qwen3-128k/evaluation/evaluation.html").stat().st_size > 1000
    records = [json.loads(line) for line in Path("runs/qwen3-128k/metrics.jsonl").read_text().splitlines()]
    assert [record["stage"] for record in records if record["type"] == "stage"] == ["full", "moba"]
    assert {"boundary", "position_wise", "stage_exit"} <= {record["type"] for record in records}
    (code,) = blocks(GUIDE, "python")
    exec(code, {})
    assert "Once upon a time" in capsys.readouterr().out
    last = load_config("runs/qwen3-128k/config.yaml").stages[-1]
    exported = json.loads(Path("models/Qwen3-0.6B-128K/config.json").read_text())
    assert exported["max_position_embeddings"] == last.seq_len
    assert [layer["kind"] for layer in exported["moba"]["layers"]] == ["moba", "full", "full", "full"]
