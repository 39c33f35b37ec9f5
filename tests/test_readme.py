"""README: short, and true. Its recipe, its code and its numbers are run or compared with result files."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.training_rows import Row, parse_row
from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import packed_layout
from moba_train.config.load import load_config
from tests.guide import ROOT, blocks, commands, run

README = ROOT / "README.md"
TABLE = "training-8b-h200-x2.json"
MEASURED = "128K:moba-512-8:budget:cp2:warm1:steps3"
"""The row of the table's 128K tokens with MoBA."""
TEXT = " ".join(README.read_text().split())


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["results"]


def test_it_is_read_in_ten_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 150
    prose = re.sub(r"```.*?```|\]\([^)]*\)|`[^`]*`", " ", README.read_text(), flags=re.DOTALL)
    numbers = re.findall(r"(?<![\w.-])\d[\d,.]*", prose)
    assert 20 < len(numbers) <= 40


def test_its_table_is_of_one_file() -> None:
    measured = results(TABLE)

    def rate(row: str) -> str:
        return f"{measured[row]['tokens_per_s_per_device']['median']:,.0f}"

    long = "128K:{}:full:cp2:warm1:steps2"
    moba = "512K:moba-512-8:budget:offload:cp2:warm1:steps1:memory.host_gib=110"
    middle = "64K:{}:full:cp2:warm2:steps3"
    rows = (
        (
            "64K",
            rate(middle.format("torchtitan")),
            rate(middle.format("full")),
            rate("64K:moba-512-8:budget:cp2:warm2:steps3"),
        ),
        (
            "128K",
            rate(long.format("torchtitan")),
            rate(long.format("full")),
            rate(MEASURED),
        ),
        ("512K", "not run", "not run", rate(moba)),
    )
    for row in rows:
        assert f"| {' | '.join(row)} |" in TEXT
    peaks = (f"{measured[row]['memory_gib']:.0f}" for row in (long.format("torchtitan"), long.format("full"), MEASURED))
    assert "take {}, {} and {} GiB of each GPU".format(*peaks) in TEXT


def test_at_8k_both_trainers_are_level() -> None:
    measured = results("training-8b-8k-compiled-sums-h200-x2.json")
    ours, theirs = (measured[f"8K:{name}:warm20:steps20"]["step_s"]["median"] for name in ("full", "torchtitan"))
    assert ours / theirs == pytest.approx(1, abs=0.02)
    assert "At 8K with full attention, both trainers are level" in TEXT


def test_the_mix_of_its_recipe_was_timed_next_to_torchtitan() -> None:
    rows = results("training-8b-128k-mix-h200-x2.json")
    mix, peer = (
        rows[f"128K:{row}"]["tokens_per_s_per_device"]["median"]
        for row in ("moba-512-8-last3:budget:cp2", "torchtitan:full:cp2:warm2:steps3")
    )
    assert f"[{mix:,.0f}]" in TEXT
    assert f"{mix / peer:.1f} times torchtitan's rate" in TEXT


def test_what_moba_costs_is_what_was_measured() -> None:
    loss = {entry["attention"]: entry["mean"][-1] for entry in results("smollm2-32k-h200.json")}
    assert f"has a loss of {loss['MoBA']:.2f} nats on its last 2K tokens; with full attention the same weights" in TEXT
    assert f"the same weights have {loss['full']:.2f}" in TEXT
    passed = {name: found["passed"][-1] for name, found in retrieval()["maps"].items()}  # at 32K, by depth
    moba, full = (100 * sum(passed[name]) / len(passed[name]) for name in ("moba", "full"))
    assert f"finds {moba:.0f} % of the needles with MoBA, only those in the last block, and {full:.0f} % with" in TEXT
    assert passed["moba"][:-1] == [0.0] * 4


def test_a_window_is_ahead_of_large_blocks() -> None:
    """F14, whose verdicts the tests of docs/explanation/quality.md compute."""
    quality = " ".join((ROOT / "docs" / "explanation" / "quality.md").read_text().split())
    assert "A window of as many keys is better** than MoBA with blocks of 512" in quality
    assert "MoBA with blocks of 128 is indistinguishable from one" in quality
    assert "Trained from scratch, a [window](docs/explanation/quality.md) of as many keys beats these blocks." in TEXT


def retrieval() -> Any:
    """Needles that the extended SmolLM2 was asked for."""
    return results("smollm2-retrieval-h200.json")["extended"]["needle"]


def test_its_recipe_needs_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe,) = blocks(README, "yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe)
    plan = next(words for words in commands(blocks(README, "bash")[-1]) if words[1] == "plan")
    last = run(plan, "--no-data").splitlines()[-1]
    assert f"`plan` ends with `{last}`." in README.read_text()


def test_its_recipe_trains_as_the_rows_of_its_table_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key that sets the rate is equal, so that users get it: the model, the data and the steps differ, and the
    layers that stay full."""
    (recipe,) = blocks(README, "yaml")
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(recipe)
    row = parse_row(MEASURED, Row()).recipe("llama3-8b", tmp_path / "corpus", tmp_path / "run", 2, 1)
    Path("row.yaml").write_text(yaml.safe_dump(row))
    users, measured = (load_config(f"{name}.yaml") for name in ("recipe", "row"))
    for key in (
        "compile", "activation_checkpointing", "activation_offload", "micro_batch_size", "precision", "deterministic",
        "memory", "loss_norm",
    ):  # fmt: skip
        assert getattr(users, key) == getattr(measured, key), key
    assert users.optim.model_copy(update={"lr": measured.optim.lr}) == measured.optim
    assert getattr(users.attention, "moba") == getattr(measured.attention, "moba")  # noqa: B009  # a section by its kind
    assert users.stages[0].parallel is not None
    assert users.stages[0].parallel.cp == measured.parallel.cp


@pytest.mark.gpu
def test_the_rate_of_its_table_is_what_two_gpus_give(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_name() != "NVIDIA H200":
        pytest.skip("the table is of two H200")
    output = tmp_path / "rows.json"
    command = ["--model", "llama3-8b", "--gpus", "2", "--rows", MEASURED, "--output", str(output)]
    subprocess.run([sys.executable, "-m", "benchmarks.training", *command], check=True, cwd=ROOT)
    rates = [json.loads(file.read_text())["results"][MEASURED]["tokens_per_s_per_device"]["median"]
             for file in (output, ROOT / "benchmarks" / "results" / TABLE)]  # fmt: skip
    assert rates[0] == pytest.approx(rates[1], rel=0.05)


def test_its_attention_kind_is_exact() -> None:
    (code,) = blocks(README, "python")
    names: dict[str, Any] = {}
    exec(code, names)
    kind: AttentionKind = names["LocalBlocks"](names["LocalBlocks"].Options(block_size=16), 16)
    q, k, v = (torch.randn(100, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    (attention,) = kind.attentions
    out, _ = LOCAL_ENGINE(q, k, v, attention, packed_layout([100]))
    token = torch.arange(100)
    block = token // 16
    seen = (token[:, None] >= token) & (block[:, None] - block <= 1)
    q_HTd, k_KTd, v_KTd = (x.transpose(0, 1) for x in (q, k, v))
    expected = scaled_dot_product_attention(q_HTd, k_KTd, v_KTd, attn_mask=seen, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
