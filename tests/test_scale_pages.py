"""The pages about layouts, context parallelism and kernels say what the programs print and the result files hold."""

import json
from typing import Any

import pytest

from benchmarks import cluster_layouts
from benchmarks.attention_rows import short
from tests.commands import run_app
from tests.guide import PROGRAMS, ROOT, blocks, commands, run
from tests.test_docs import results, rows

PARALLELISM = ROOT / "docs" / "how-to" / "parallelism.md"


@pytest.mark.slow
def test_the_usual_layouts_are_those_of_plan() -> None:
    """After a change: python -m benchmarks.cluster_layouts --rules --write docs/how-to/parallelism.md."""
    assert f"\n{cluster_layouts.rules()}\n" in PARALLELISM.read_text()


def test_the_page_shows_what_plan_prints() -> None:
    (command,) = (words for words in commands(blocks(PARALLELISM, "bash")[0]) if words[1] == "plan")
    printed = {line.strip() for line in run(command).splitlines()}
    (shown,) = (block for block in blocks(PARALLELISM, "text") if "as arguments of" in block)
    lines = [line.strip() for line in shown.splitlines() if line != "..."]
    assert len(lines) == 5
    assert [line for line in lines if line not in printed] == []


def test_the_page_shows_what_plan_says_of_a_recipe_that_does_not_fit() -> None:
    page = ROOT / "docs" / "how-to" / "out-of-memory.md"
    (words,) = commands(blocks(page, "bash")[0])
    done = run_app(PROGRAMS[words[0]], *words[1:], code=2)
    (shown,) = blocks(page, "text")
    assert shown in done.output


def test_the_page_says_which_share_of_one_gpus_rate_each_transport_keeps() -> None:
    names = {"dense": "full", "4096/12": "MoBA, blocks of 4,096, top 12", "512/8": "MoBA, blocks of 512, top 8"}
    found: dict[tuple[str, str], list[int]] = {}
    for part in ("", "-dense"):
        for entry in results(f"context-parallel{part}-h200.json"):
            if short(entry["tokens"]) == "256K":
                shares = found.setdefault((names[entry["attention"]], entry["transport"]), [])
                shares.append(round(100 * entry["efficiency"]))
    told = rows("docs/explanation/context-parallelism.md")
    for name in names.values():
        cells = [sorted({*found[name, way]}) for way in ("allgather", "ring", "ulysses", "hierarchical")]
        assert (name, *(" to ".join(map(str, [*cell[:1], *cell[1:][-1:]])) + " %" for cell in cells)) in told


def dense_and_moba(file: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Milliseconds of the fastest dense kernel and of MoBA, forward and backward, by setting and tokens of a document,
    where blocks are more than topk."""
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for entry in results(file):
        if "setting" in entry and not entry["same_result"]:
            dense = min(times["median"] for times in entry["dense_ms"].values() if "median" in times)
            found[entry["setting"], entry["length"]] = dense, entry["moba_ms"]["median"]
    return found


def attention(row: str) -> tuple[float, float]:
    """Milliseconds of dense attention and of MoBA in a row of `benchmarks.attention`."""
    (columns,) = (entry["columns"] for entry in results("attention-h200.json") if entry["row"] == row)
    both: dict[str, Any] = {
        name: column["both_ms"]["median"] for name, column in columns.items() if "both_ms" in column
    }
    return min(both[name] for name in ("cudnn", "flash2", "flash4") if name in both), both["auto"]


def test_the_page_says_from_which_length_on_sparsity_pays() -> None:
    measured = dense_and_moba("crossover-h200.json")
    told = rows("docs/explanation/kernels.md")
    for setting, block, topk in (("512/3", 512, 3), ("512/8", 512, 8), ("2048/4", 2048, 4)):
        lengths = {length: times for (name, length), times in measured.items() if name == setting}
        slower = max(length for length, (dense, moba) in lengths.items() if dense < moba)
        faster = min(length for length, (dense, moba) in lengths.items() if moba < dense)
        assert slower < faster
        row = f"{block} keys, top {topk}", f"{short(slower)} tokens", f"{short(faster)} tokens"
        assert row in told
    dense, moba = attention("64K:4096/12,routing=uniform")
    assert dense < moba
    dense, moba = attention("128K:4096/12")
    assert moba < dense
    assert ("4096 keys, top 12", "64K tokens", "128K tokens") in told
    dense, moba = attention("128K:128/8")
    text = " ".join((ROOT / "docs" / "explanation" / "kernels.md").read_text().split())
    assert f"blocks of 128 keys and top 8 is {dense / moba:.0f} times as fast as the fastest dense kernel" in text


def test_the_page_has_the_measured_rates_and_losses() -> None:
    text = " ".join((ROOT / "docs" / "how-to" / "precision-and-optimizers.md").read_text().split())
    speeds = results("training-8b-8k-copy-engines-h200-x2.json")
    fp8, bf16 = (speeds[row]["tokens_per_s_per_device"]["median"] for row in ("8K:full:fp8:steps10", "8K:full:steps10"))
    assert f"trains {fp8:,.0f} tokens/s/GPU instead of {bf16:,.0f} at 8K" in text
    adamw, moved = json.loads((ROOT / "benchmarks/results/optimizers-train-8b-h200.json").read_text()), "deepspeed_cpu"
    found = adamw["results"][moved]
    assert f"in {found['memory_gib']['median']:.1f} GiB, at {found['step_s']['median']:.1f} s a step" in text
