"""Tables that were copied from result files by hand say what the files say."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]


@pytest.mark.parametrize(
    ("name", "gpus", "variant"),
    [
        ("training-1b-h200", 1, "full"),
        ("training-1b-h200", 1, "full, recomputed"),
        ("training-1b-h200", 1, "MoBA 512/3, last 3 full"),
        ("training-1b-h200-flash2", 1, "full"),
        ("training-1b-h200-x2", 2, "full"),
    ],
)
def test_the_trainer_in_the_readme(name: str, gpus: int, variant: str) -> None:
    rate, mfu, dense = (
        results(name)[variant][key]["median"] for key in ("tokens_per_s_per_device", "mfu", "mfu_dense")
    )
    assert f"| {gpus} | {rate:,.0f} | {100 * mfu:.1f} % | {100 * dense:.1f} % |" in (ROOT / "README.md").read_text()


def test_the_transports() -> None:
    text = (ROOT / "docs" / "context-parallelism.md").read_text()
    rows = results("context-parallel-h200")
    for attention, tokens, layout in {(row["attention"], row["tokens"], row["layout"]) for row in rows}:
        cells = {
            row["transport"]: f"{row['ms']['median']:.1f} ({100 * row['efficiency']:.0f} %)"
            for row in rows
            if (row["attention"], row["tokens"], row["layout"]) == (attention, tokens, layout)
        }
        times = " | ".join(cells[name] for name in ("allgather", "ring", "ulysses", "hierarchical"))
        assert f"| {attention} | {tokens // 1024}K | {layout} | {times} |" in text


def test_the_crossover() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text()
    found = 0
    for row in results("crossover-h200"):
        where = f"| {row['documents']} x {row['length'] // 1024}K, {row['setting']} | {row['blocks']} |"
        if where in text:
            found += 1
            dense = min(spread["median"] for spread in row["dense_ms"].values())
            times = [float(f"{ms:.3g}") for ms in (row["moba_ms"]["median"], dense)]
            line = next(line for line in text.splitlines() if line.startswith(where))
            assert [float(cell.partition(":")[0]) for cell in line.split("|")[3:5]] == pytest.approx(times, rel=0.02)
    assert found == 9


def test_the_full_layers_of_fine_tuning() -> None:
    text = (ROOT / "docs" / "sft.md").read_text()
    for row in results("sft-layers-h200")["summary"]:
        digits = 3 if row["loss"] < 0.1 else 2
        assert f"| {row['loss']:.{digits}f} ± {row['loss_error']:.{digits}f} |" in text


def test_packing_and_tokenizers() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    for row in results("packing"):
        cuts, padding = 100 * row["concat_cuts"], 100 * row["best_fit_padding"]
        assert f"| {row['seq_len']:,} | {cuts:.1f} % | 0 | {padding:.2f} % |" in text
    for kind in results("tokenize-cpu").values():
        for row in kind["engines"].values():
            if "again" in row:
                rates = f"{row['first']['median']:.2f} | {row['again']['median']:.2f}"
                assert f"| {rates} | {row['equal']} of {row['texts']} |" in text
