"""README: short, and true. Its recipe, its code and its numbers are run or compared with result files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import packed_layout
from tests.guide import ROOT, blocks, commands, run

README = ROOT / "README.md"
TEXT = " ".join(README.read_text().split())


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["results"]


def test_it_is_read_in_ten_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 150
    prose = re.sub(r"```.*?```|\]\([^)]*\)|`[^`]*`", " ", README.read_text(), flags=re.DOTALL)
    numbers = re.findall(r"(?<![\w.-])\d[\d,.]*", prose)
    assert 20 < len(numbers) <= 40


def test_its_table_is_of_one_file() -> None:
    measured = results("training-8b-h200-x2.json")

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
            rate("128K:moba-512-8:budget:cp2:warm1:steps3"),
        ),
        ("512K", "not run", "not run", rate(moba)),
    )
    for row in rows:
        assert f"| {' | '.join(row)} |" in TEXT


def test_at_8k_both_trainers_are_level() -> None:
    measured = results("training-8b-8k-compiled-sums-h200-x2.json")
    ours, theirs = (measured[f"8K:{name}:warm20:steps20"]["step_s"]["median"] for name in ("full", "torchtitan"))
    assert ours / theirs == pytest.approx(1, abs=0.02)
    assert "At 8K tokens with full attention, both trainers are level." in TEXT


def test_what_moba_costs_is_what_was_measured() -> None:
    loss = {entry["attention"]: entry["mean"][-1] for entry in results("smollm2-32k-h200.json")}
    assert f"has a loss of {loss['MoBA']:.2f} on its last 2K tokens; with full attention the same weights" in TEXT
    assert f"the same weights have {loss['full']:.2f}" in TEXT
    passed = {name: found["passed"][-1] for name, found in retrieval()["maps"].items()}  # at 32K, by depth
    moba, full = (100 * sum(passed[name]) / len(passed[name]) for name in ("moba", "full"))
    assert f"finds {moba:.0f} % of the needles with MoBA, only those in the last block, and {full:.0f} % with" in TEXT
    assert passed["moba"][:-1] == [0.0] * 4


def test_a_window_is_between_small_and_large_blocks_in_the_comparison_of_all_mechanisms() -> None:
    arms = json.loads((ROOT / "experiments" / "results" / "mechanisms.json").read_text())["results"]["arms"]
    loss = {
        arm["name"]: arm["stages"]["train"]["position_wise"]["trailing_loss"]
        for arm in arms
        if "train" in arm["stages"]
    }
    window = loss["moa-8k"]  # spans of the same length in all heads
    assert loss["full-8k"] < loss["moba-128-8k"] < window < loss["moba-8k"]
    assert "a sliding window with sinks was ahead of MoBA with blocks of 512 and behind it with 128" in TEXT


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
