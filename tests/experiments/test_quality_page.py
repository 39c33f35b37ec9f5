"""What docs/explanation/quality.md says of the figures, computed again from their result files."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import page
from experiments.comparison import Estimate
from experiments.figure import Figure, Result
from experiments.fits import fit
from experiments.inference_gap import exchanges
from experiments.needles import chances
from experiments.rates import moba_over_full
from experiments.readings import mean_keys, trailing_loss
from experiments.registry import FIGURES
from experiments.scaling import Scaling, middle
from experiments.trailing import Trailing, pairs_of
from experiments.versions import insertion_costs

ROOT = page.FOLDER.parent
TEXT = (ROOT / "docs" / "explanation" / "quality.md").read_text()
PROSE = " ".join(TEXT.split())
REPORT = (page.FOLDER / "REPORT.md").read_text()
README = " ".join((ROOT / "README.md").read_text().split())
VERSIONS = ("v2", "v0.5", "v1, sum", "v1, gate")
ROWS = {
    match[1]: match[2]
    for match in re.finditer(r"^\| \[F\d+\]\([^)]*REPORT\.md#(.*?)\).*\| ([^|]+) \|$", TEXT, re.MULTILINE)
}
"""Verdict of each row, by the anchor of the figure's section."""


def results(name: str) -> list[Result]:
    return page.read_results(page.result_file(FIGURES[name]))


def anchor(figure: Figure) -> str:
    """Anchor of the section of REPORT.md that has the figure's marker."""
    before, _, _ = page.PAGE.read_text().partition(page.marker(figure))
    heading = re.findall(r"^## (.*)$", before, re.MULTILINE)[-1]
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def allowed(figure: Figure) -> set[str]:
    """Verdicts that a row may have: of several claims that were judged, the first or that some agree."""
    known = results(figure.name)
    words = [verdict.word for verdict in figure.find(known).verdicts]
    if not words:
        return {"none", "one seed"}
    if len({result["seed"] for result in known if "base" not in result["name"] and result["stages"]}) < 2:
        return {"one seed"}
    if len(set(words)) == 1:
        return {words[0]}
    in_part = {"agrees in part"} if "agrees" in words else set()
    return in_part | ({"agrees in sign"} if words[0] == "agrees" else {words[0]} - {"does not agree"})


@pytest.mark.parametrize("figure", FIGURES.values(), ids=lambda figure: figure.name)
def test_a_verdict_of_the_page_is_that_of_the_file(figure: Figure) -> None:
    said = ROWS.get(anchor(figure), "none")
    if figure.name == "scaling":  # its claim is of other text than the published one
        assert said == "cannot be compared"
        assert "The published claim cannot be tested so" in page.PAGE.read_text()
    else:
        assert said in allowed(figure)


def gaps(figure: Scaling | Trailing, name: str) -> dict[str, Estimate]:
    """MoBA's loss above full attention's by the fits, in per cent, at equal tokens, real FLOPs and time."""
    known = results(name)
    rate = moba_over_full(figure.seq_len)
    assert rate is not None
    found = {}
    for what, axis, tokens in (("tokens", "6ND", 1.0), ("FLOPs", "real", 1.0), ("time", "6ND", rate)):
        fits = fit(known, figure.loss, axis)
        assert fits is not None
        found[what] = fits.gap(middle(known, axis), tokens)
    return found


def test_equal_flops_and_equal_time_are_those_of_the_fits_and_of_the_rates() -> None:
    short = gaps(Scaling(), "scaling")
    long = gaps(Trailing(), "trailing")
    assert f"it is {short['time'].value:.0f} % behind at 8K and {long['time'].value:.0f} % in the last 2K" in PROSE
    assert short["time"].low > 0
    assert long["time"].low > 0
    assert f"MoBA is {-short['FLOPs'].value:.0f} % ahead at 8K" in PROSE
    assert short["FLOPs"].high == pytest.approx(0, abs=0.15), "hardly beyond the error"
    assert f"and {-long['FLOPs'].value:.0f} % in the last 2K of 32K tokens. FLOPs are not time" in PROSE
    rates = [f"{moba_over_full(seq_len):.2f}" for seq_len in (8192, 32_768)]
    assert f"MoBA trains {' and '.join(rates)} times as many tokens in the same time" in PROSE


def test_losses_are_those_of_the_files() -> None:
    trailing = pairs_of(results("trailing"))
    early = [pair["full"]["stages"]["train"]["position_wise"]["position_wise"] for pair in trailing]
    behind = [
        trailing_loss(pair["moba"]) > data["curves"][data["attention"]]["mean"][1]
        for pair, data in zip(trailing, early, strict=True)
    ]
    assert f"in {sum(behind)} of {len(behind)} pairs of models" in PROSE
    gap = statistics.mean(trailing_loss(pair["moba"]) - trailing_loss(pair["full"]) for pair in trailing)
    assert f"the last 2K tokens lose {gap:.2f} nats" in PROSE
    by_size: dict[str, list[float]] = {}
    for pair in pairs_of(results("scaling")):
        difference = Scaling().loss(pair["moba"]) - Scaling().loss(pair["full"])
        by_size.setdefault(pair["full"]["name"], []).append(difference)
    shares = [
        100 * (Scaling().loss(pair["moba"]) / Scaling().loss(pair["full"]) - 1) for pair in pairs_of(results("scaling"))
    ]
    assert f"at 8K, its validation loss is {min(shares):.1f} to {max(shares):.1f} % higher" in README
    means = [statistics.mean(values) for values in by_size.values()]
    assert min(map(min, by_size.values())) > 0, "at every size and with both seeds"
    assert f"it is {min(means):.2f} to {max(means):.2f} nats behind" in PROSE
    hybrid = FIGURES["hybrid"].find(results("hybrid")).verdicts[0].estimate
    assert f"{hybrid.value:.3f} nats above it in the last tokens, ± {hybrid.half:.3f}" in PROSE


def test_a_window_of_as_many_keys_is_ahead_of_blocks_of_512() -> None:
    behind = results("why-behind")
    arms = {result["name"]: result for result in [*results("mechanisms"), *behind]}
    assert mean_keys(arms["long-window1280"]) == pytest.approx(mean_keys(arms["long-moba"]), rel=0.01)
    (window,) = (one for one in FIGURES["why-behind"].find(behind).verdicts if "512/3 has a lower" in one.claim)
    gap = window.estimate
    assert window.word == "does not agree"
    assert f"{gap.value:.3f} nats ahead in the last tokens ({gap.low:.3f} to {gap.high:.3f}, three seeds)" in PROSE
    verdicts = {one.claim: one for one in FIGURES["why-behind"].find(behind).verdicts}
    found = {
        word: one for claim, one in verdicts.items() for word in ("1K tokens", "128/12", "previous") if word in claim
    }
    assert [one.word for one in found.values()] == ["inconclusive", "inconclusive", "agrees"]
    short, small_blocks, previous = (found[word].estimate for word in ("1K tokens", "128/12", "previous"))
    assert f"At 8K, MoBA is {short.value:.4f} ± {short.half:.3f} nats from full attention if" in PROSE
    assert f"is indistinguishable from one ({small_blocks.value:.3f} ± {small_blocks.half:.3f})" in PROSE
    rows = {(row[0], row[1]): row for row in FIGURES["why-behind"].find(behind).rows}
    assert f"{float(rows['long', 'moba'][4]):.3f} behind in long documents" in PROSE
    (heads,) = (one.estimate for claim, one in verdicts.items() if "12 heads of 32" in claim)
    assert f"by {heads.value:.3f} ± {heads.half:.3f}: inconclusive" in PROSE
    assert f"takes back {-previous.value:.3f} of {float(rows['long', 'moba'][7]):.3f} nats" in PROSE
    moba, moa, small = (arms[f"{name}-8k"] for name in ("moba", "moa", "moba-128"))
    assert trailing_loss(small) < trailing_loss(moa) < trailing_loss(moba)
    assert f"attend to {mean_keys(moba):,.0f} (blocks of 512) to {mean_keys(moa):,.0f} on average" in PROSE


def test_what_equal_seconds_found() -> None:
    rows = table("equal-time", "arm")
    kinds = "full", "moba", "window", "short", "early"
    full, moba, window, short, early = (rows[(f"{kind}-64k",)] for kind in kinds)
    verdicts = FIGURES["equal-time"].find(results("equal-time")).verdicts
    claims = "32K, MoBA, then full, is at least 0.01 below full", "64K, MoBA, then full, is at least 0.01 below full"
    at_32k, at_64k, to_short, to_window, by_early, early_less = (
        next(one for one in verdicts if claim in one.claim)
        for claim in (*claims, "above 8K first", "below a window", "60 %, then full, is not", "60 %, then full, is b")
    )
    assert [one.word for one in (at_32k, at_64k, to_short)] == ["does not agree"] * 3
    assert to_window.word == "agrees"
    gaps = " and ".join(f"{one.estimate.value:.3f} ± {one.estimate.half:.3f}" for one in (at_32k, at_64k))
    assert f"ends {gaps} nats above full attention throughout" in PROSE
    tokens = [float(rows[(name,)]["tokens"][:-1]) for name in ("moba-32k", "full-32k", "moba-64k", "full-64k")]
    assert f"after {tokens[0] / tokens[1]:.1f} and {tokens[2] / tokens[3]:.1f} times as many tokens" in PROSE
    assert by_early.word == early_less.word == "inconclusive"
    assert f"instead of 88 % finds {float(early['needles, full']):.2f}, and its loss is inconclusive" in PROSE
    assert f"{to_short.estimate.value:.3f} ± {to_short.estimate.half:.3f} below MoBA" in PROSE
    assert f"ends {-to_window.estimate.value:.3f} ± {to_window.estimate.half:.3f} nats above MoBA" in PROSE
    found = [f"{float(arm['needles, full']):.2f}" for arm in (moba, full, short)]
    assert "finds {} of the needles, full attention {}, 8K first {}".format(*found) in PROSE
    assert f"but finds {float(window['needles, full']):.2f} of the needles" in PROSE
    most = max(at_32k.estimate.value, at_64k.estimate.value)
    assert f"In equal minutes of a small model MoBA was up to {most:.3f} nats behind at 32K and 64K" in README


def test_mean_keys_are_those_of_a_count_query_by_query() -> None:
    (moba,) = (one for one in results("mechanisms") if one["name"] == "moba-8k")
    counted = [min(position // 512, 2) * 512 + position % 512 + 1 for position in range(8192)]
    assert mean_keys(moba) == pytest.approx(statistics.mean(counted), abs=0.5)


def test_what_inference_is_of_the_gap_and_that_gates_learn_nothing() -> None:
    shares = {}
    for label, pairs in exchanges(results("trailing")).items():
        full, moba, as_full, _ = np.array(pairs).mean(0)
        shares[label.rpartition(":")[0] or label] = 100 * (moba - as_full) / (moba - full)
    trailing = shares["F2, 32K, trailing loss"]
    short = shares["F8, 8K, validation loss"]
    assert f"make up for {trailing:.0f} % of it in the last 2K of 32K" in PROSE
    assert f"At 8K it is {short:.0f} %, and about 80 % in fine-tuning" in PROSE
    cliffs = [share for label, share in shares.items() if label.startswith("F6")]
    assert cliffs == pytest.approx([80, 80], abs=2)
    (at_once, *_) = insertion_costs(results("versions"))["moba"]
    trained = {result["name"]: Scaling().loss(result) for result in results("versions")}
    gap = trained["moba-10m-x1"] - trained["full-10m-x1"]
    assert f"it costs {gap:.3f} nats if the model was trained with it, and {at_once:.3f} if it is inserted" in PROSE


def test_chance_and_needles_outside_the_own_block() -> None:
    blind = chances(results("needles"))
    assert f"By chance it would be {100 * blind[32, 48]:.0f} and {100 * blind[512, 3]:.0f} %" in PROSE
    file = ROOT / "benchmarks" / "results" / "smollm2-retrieval-h200.json"
    found: Any = json.loads(Path(file).read_text())["results"]["extended"]["needle"]
    history = {name: np.array(one["passed"])[2:, :4].mean() for name, one in found["maps"].items()}
    assert found["lengths"][2:] == [16_384, 32_768]
    assert history["moba"] == 0
    assert f"none in 16K and 32K tokens, and full attention {history['full']:.2f}" in PROSE


def estimates(name: str) -> list[Estimate]:
    """The figure's verdicts, in their order."""
    return [verdict.estimate for verdict in FIGURES[name].find(results(name)).verdicts]


def table(name: str, *columns: str) -> dict[tuple[str, ...], dict[str, str]]:
    """Rows of the figure's table by the first cells, which are those of `columns`."""
    head, *rows = FIGURES[name].find(results(name)).rows
    return {tuple(row[: len(columns)]): dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)}


def test_sizes_in_the_table_of_claims_are_those_of_the_files() -> None:
    position = table("position", "tokens")
    first, last = (float(position[(bucket,)]["gap"]) for bucket in ("0 to 2048", "30720 to 32768"))
    assert f"{first:.2f} nats in the first 2K, {last:.2f} in the last" in PROSE
    coarse, _, blocks, convolution = (estimate.value for estimate in estimates("granularity"))
    assert f"8 blocks lose {coarse:.2f} nats to 128" in PROSE
    assert f"by {-blocks:.2f} nats each at 8K" in PROSE
    assert f"{-convolution:.2f}" == f"{-blocks:.2f}"
    for name in ("third-cliff", "third-cliff-smaller-blocks"):
        cliff = table(name, "layers", "tokens with loss")
        moba, last_3 = (float(cliff[layers, "0.3 %"]["after"]) for layers in ("MoBA", "last 3 full"))
        assert f"{moba:.2f} nats; with 3 full layers {last_3:.2f} | one seed" in PROSE
    versions = table("versions", "")
    behind = [
        min(float(versions[(f"{name}, {size}",)]["above full"]) for size in ("4m", "10m", "25m")) for name in VERSIONS
    ]
    assert f"v2 loses {behind[0]:.2f}, v0.5 {behind[1]:.2f}, v1 {min(behind[2:]):.2f} nats or more" in PROSE
    assert f"the first block costs {estimates('forced')[0].value:.2f} nats" in PROSE
    stage = estimates("long-stage")[0]
    assert f"MoBA in the full layers {stage.value:.3f} ± {stage.half:.3f} nats behind at 64K" in PROSE
    far = table("extrapolation", "read as")
    moba, yarn = (float(far[(way,)]["needles 128K"]) for way in ("moba-nope", "full, YaRN"))
    assert f"at 128K MoBA without positions finds {moba:.2f}, full attention with YaRN {yarn:.2f}" in PROSE
    window, blocks_128 = estimates("with-window")[:2]
    text = f"{-window.value:.3f} ± {window.half:.3f} nats ahead of a window, {-blocks_128.value:.3f} ± "
    assert f"{text}{blocks_128.half:.3f} of MoBA" in PROSE
    rows = [row for row in FIGURES["with-experts"].find(results("with-experts")).rows if row[0] == "experts"]
    experts = {row[1]: float(row[7]) for row in rows if row[1] != "full"}
    text = (
        f"MoBA {experts['moba']:.3f} nats behind full attention with blocks of 512, {experts['blocks128']:.3f} with 128"
    )
    assert text in PROSE


def test_losses_of_few_tokens_in_long_trajectories_are_those_of_the_file() -> None:
    rows = table("third-cliff-lengths", "layers", "trajectory")
    loss = {arm: float(row["after"]) for arm, row in rows.items()}
    moba = [loss["MoBA", length] for length in ("32K", "64K", "128K")]
    two = [loss["last 2 of 8 full", length] for length in ("32K", "64K", "128K")]
    full = loss["full", "32K"]
    assert f"MoBA ends at {moba[0]:.2f} nats at 32K, full attention at {full:.2f}; at 128K {moba[2]:.2f}, " in PROSE
    assert f", {two[2]:.2f} with 2 full layers" in PROSE
    assert f"{moba[0]:.2f}, {moba[1]:.2f} and {moba[2]:.2f} nats. Full attention" in REPORT
    gain = [one - other for one, other in zip(moba, two, strict=True)]
    assert f"gain {gain[2]:.2f} nats at 128K and {gain[0]:.2f} at 32K, and lose {-gain[1]:.2f} at 64K" in REPORT
    histories = [result["history"] for result in results("third-cliff-lengths") if result["name"] != "base"]
    changes = [abs(one[-1]["eval_loss"] - one[-2]["eval_loss"]) for one in histories]
    assert {(one[-2]["step"], one[-1]["step"]) for one in histories} == {(100, 150)}
    assert f"after steps 100 and 150, losses change by up to {max(changes):.2f}" in REPORT


def test_other_kinds_and_smaller_blocks_are_those_of_the_files() -> None:
    gaps = {
        name: float(row["above full"]) for (name,), row in table("mechanisms", "").items() if row["above full"] != "–"
    }
    near = sorted(gaps[f"{name}-8k"] for name in ("infllm_v2", "msa"))
    assert (
        f"MSA lose {near[0]:.2f} to {near[1]:.2f} nats and MoBA with blocks of 512 loses {gaps['moba-8k']:.2f}" in PROSE
    )
    near = sorted(gaps[f"{name}-32k"] for name in ("nsa", "infllm_v2", "seer"))
    mobas = sorted(gaps[f"moba{name}-32k"] for name in ("", "-128", "-128-conv"))
    text = (
        f"SeerAttention lose {near[0]:.2f} to {near[-1]:.2f} nats and MoBA {mobas[0]:.2f} to {mobas[-1]:.2f} (one seed)"
    )
    assert text in PROSE
    gates = table("needles", "arm, gate")
    for gate, text in (("32/48", "32 keys a block miss a needle in"), ("512/3", "512 keys in")):
        missed = [100 * float(row["missed"]) for (name,), row in gates.items() if name.endswith(f", {gate}, retrieval")]
        assert f"{text} {min(missed):.0f} to {max(missed):.0f} %" in PROSE
