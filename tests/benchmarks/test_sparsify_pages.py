"""Numbers of benchmarks/measured/sparsify.md and of the pages that quote it, computed again from the result files."""

import json
import re
import statistics
from collections.abc import Mapping
from typing import Any

from tests.guide import ROOT

Arm = Mapping[str, Any]


def one_line(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


MEASURED = (ROOT / "benchmarks" / "measured" / "sparsify.md").read_text()
PROSE = one_line("benchmarks/measured/sparsify.md")
QUALITY = one_line("docs/explanation/quality.md")
HOW_TO = one_line("docs/how-to/sparsify.md")
NEEDLES = 160
"""Samples of an arm in the fifth run, and of both seeds together in the third."""


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}-h200.json").read_text())["results"]


def arms_of(run: str) -> dict[str, list[Arm]]:
    """Results of `moba-train sparsify` in this run, by arm, a seed each."""
    (summary,) = results(f"sparsify-{run}")
    arms: dict[str, list[Arm]] = summary["arms"]
    return arms


def fifth() -> tuple[Arm, Arm, Arm]:
    """Sparse attention, full attention on as many tokens, and for as many seconds."""
    arms = arms_of("fifth")
    return arms["sparse"][0], arms["full"][0], arms["equal-seconds"][0]


def share(value: float) -> str:
    """Halves are rounded up."""
    return f"{value + 1e-9:.3f}"


def above(one: Arm, other: Arm) -> tuple[float, float]:
    """Trailing loss above the other arm's over the same sequences, and its standard error."""
    apart = [a - b for a, b in zip(one["trailing_by_sequence"], other["trailing_by_sequence"], strict=True)]
    assert len(apart) == 8
    assert len({*one["trailing_documents"]}) == 2
    return statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5


def found_of(one: float, other: float) -> tuple[float, float]:
    """Ratio of two shares of needles, and its standard error if all outcomes are independent."""
    ratio = one / other
    return ratio, ratio * sum((1 - each) / each / NEEDLES for each in (one, other)) ** 0.5


def test_the_claims_are_what_the_file_says() -> None:
    sparse, full, equal = fifth()
    kept, error = found_of(sparse["needle"], full["needle"])
    loss, later = above(sparse, full), above(sparse, equal)
    ruler, ruler_later = (100 * (sparse["ruler"] - one["ruler"]) for one in (full, equal))
    assert f"loses {loss[0]:.3f} ± {loss[1]:.3f} nats of trailing loss to full attention" in PROSE
    assert f"finds {kept:.2f} ± {error:.2f} as many needles" in PROSE
    assert re.findall(r"^\| [1-4]\. .* \| (.*) \|$", MEASURED, re.MULTILINE) == [
        f"{share(sparse['needle'])} for {share(full['needle'])}, {kept:.2f} ± {error:.2f}: not decided",
        f"holds: {loss[0]:+.3f} ± {loss[1]:.3f}",
        f"holds: {ruler:+.1f} points",
        f"does not hold: loss {later[0]:+.3f} ± {later[1]:.3f}; needles {share(sparse['needle'])} for "
        f"{share(equal['needle'])}, RULER {ruler_later:.1f} points",
    ]
    more = equal["tokens"] / full["tokens"]
    assert f"trains {more:.1f} times the tokens, and is then {later[0]:.3f} nats better" in PROSE
    for one in (full, sparse, equal):
        row = re.escape(f" | {one['tokens'] / 1e6:.1f}M | {one['trailing']:.3f} | ") + ".*"
        row += re.escape(f" | {', '.join(map(share, one['needle_by_length'].values()))} | {one['ruler']:.3f} |")
        assert re.search(f"{row}$", MEASURED, re.MULTILINE), row
    assert f"Claim 4's is {(later[0] - 0.01) / later[1]:.1f} errors above the bar" in PROSE
    assert f"full attention for the sparse arm's {sparse['train_s']:.0f} s" in MEASURED


def test_pages_that_quote_the_claims_are_what_the_file_says() -> None:
    sparse, full, equal = fifth()
    kept, error = found_of(sparse["needle"], full["needle"])
    loss, later = above(sparse, full), above(sparse, equal)
    more, slower = equal["tokens"] / full["tokens"], sparse["train_s"] / full["train_s"]
    errors = f"standard errors {error:.2f} and {loss[1]:.3f}"
    for text in (
        f"it finds {kept:.2f} of what full attention finds after the same text",
        f"its loss is {loss[0]:.3f} nats higher (one seed, {errors})",
        f"trains {more:.1f} times the tokens, and its loss is then {later[0]:.3f} nats lower",
    ):
        assert text in QUALITY
    assert f"found {kept:.2f} of full attention's needles, {loss[0]:.3f} nats above its loss ({errors})" in HOW_TO
    assert f"The sparse arm took {slower:.1f} times as long to train" in HOW_TO
    assert f"had {later[0]:.3f} nats less than sparse attention" in HOW_TO
    assert (round(10 * kept), slower > 1) == (9, True)
    assert "has full attention's loss and nine tenths of its needles, and trains slower" in one_line("README.md")
    assert f"which such training takes {slower:.1f} times full attention's time" in one_line("CHANGELOG.md")


def test_what_is_said_of_needles_and_their_errors_is_what_the_file_says() -> None:
    sparse, full, _ = fifth()
    lost = [
        16 * (one - other)
        for length, shares in full["needle_by_depth"].items()
        for one, other in zip(shares, sparse["needle_by_depth"][length], strict=True)
    ]
    assert (16 * len(lost), sum(lost), lost[0]) == (NEEDLES, 7, 4)
    apart, missed = sum(map(abs, lost)), sum(lost) / NEEDLES
    least = (apart / NEEDLES - missed**2) ** 0.5 / NEEDLES**0.5
    most = sum(one["needle"] * (1 - one["needle"]) / NEEDLES for one in (sparse, full)) ** 0.5
    assert f"the difference is {-missed:.3f} ± {most:.3f} if outcomes are independent" in PROSE
    assert f"at least {apart:.0f} outcomes differ. If no others do, the error is {least:.3f}" in PROSE
    assert f"is {missed / least:.1f} errors from 1 " in PROSE
    assert f"with 480 needles an arm the error of claim 1 is at most {most / full['needle'] / 3**0.5:.3f}" in PROSE
    assert f"needles are {0.95 - sparse['needle'] / full['needle']:.3f} short of the bar" in PROSE


def test_what_is_said_of_weights_and_time_is_what_the_file_says() -> None:
    sparse, full, equal = fifth()
    weights, own, gain = (
        one - other["trailing"]
        for one, other in ((sparse["trailing_full"], full), (sparse["trailing"], full), (full["trailing"], equal))
    )
    assert f"lose {weights:.3f} nats to those trained with full attention; with their own selection {own:.3f}" in PROSE
    assert f"They find {share(sparse['needle_full'])} of the needles with full attention" in PROSE
    assert f"gains {gain:.3f} nats from {equal['tokens'] / full['tokens']:.1f} times the tokens" in PROSE
    (dense, learned), (before, after) = (one["stages"].values() for one in (sparse, full))
    assert f"their mean losses differ by {abs(dense['loss'] - before['loss']):.4f} nats" in PROSE
    assert f"sparse attention's is {learned['loss'] - after['loss']:.3f} higher" in PROSE
    seconds = "A step takes {:.2f} s with full attention, {:.2f} while the scorer learns and {:.2f} sparse"
    assert seconds.format(*(one["step_s"] for one in (after, dense, learned))) in PROSE
    slower = [
        statistics.mean(one["train_s"] for one in arms["sparse"])
        / statistics.mean(one["train_s"] for one in arms["full"])
        for arms in map(arms_of, ("fifth", "fourth", "third"))
    ]
    text = "takes {:.1f} times as long as with full attention**, {:.1f} in the fourth run and {:.1f} in the third"
    assert text.format(*slower) in PROSE


def test_earlier_runs_are_what_their_files_say() -> None:
    third, fourth = arms_of("third"), arms_of("fourth")
    second = {one["name"]: one for one in results("sparsify-second")}
    pairs = [(fourth["sparse"][0], fourth["full"][0]), *zip(third["sparse"], third["full"], strict=True)]
    for one, other in [*pairs, (second["D"], second["full"])]:
        cells = [f"{share(one[key])} for {share(other[key])}" for key in ("trailing", "needle", "ruler")]
        assert f" | {' | '.join(cells)} |\n" in MEASURED
    own, with_full = (statistics.mean(one[key] for one in third["sparse"]) for key in ("needle", "needle_full"))
    kept, error = found_of(own, statistics.mean(one["needle"] for one in third["full"]))
    assert f"it found {kept:.2f} ± {error:.2f} of full attention's needles" in PROSE
    assert f"full attention found fewer, {with_full:.3f} for {own:.3f}" in PROSE
    assert f"With full attention on its weights it found {second['D']['needle_full']:.3f}" in PROSE
    losses = [second[name]["validation_loss"][at] for name, at in (("B", 0), ("B", 1), ("D", 1))]
    assert [step for step, _, _ in losses] == [60, 64, 64]
    text = "loss goes from {:.3f} to {:.3f} in the four steps in which the rate rises, and to {:.3f} at 1e-4"
    assert text.format(*(loss for _, _, loss in losses)) in PROSE
    everywhere = [
        one["needle_by_length"]["32768"] for arms in (third, fourth, arms_of("fifth")) for one in arms["full"]
    ]
    assert f"Full attention finds at most {max(everywhere):.3f} of the needles at 32K here" in PROSE


def test_where_sparse_training_takes_its_time_is_what_the_profile_says() -> None:
    text = (ROOT / "benchmarks" / "results" / "sparsify-profile-h200.txt").read_text()
    spans = re.findall(r"^span ([\d.]+) ms a step, GPU busy ([\d.]+), kernels (\d+) a step$", text, re.MULTILINE)
    halves = [re.findall(r"^ *([\d.]+) ms +(\d+)  (.*)$", part, re.MULTILINE) for part in text.split("\nspan ")[1:]]

    def seconds(half: list[tuple[str, str, str]], *names: str) -> float:
        return sum((float(ms) / 1e3 for ms, _, kernel in half if any(name in kernel for name in names)), 0.0)

    rows = {
        "full attention": [seconds(half, "flash", "cudnn") for half in halves],
        "scorer and selection": [seconds(half, "_scores", "_choose", "_gradients") for half in halves],
        "all kernels": [float(span) / 1e3 * float(busy) for span, busy, _ in spans],
        "a step without the profiler": [stage["step_s"] for stage in fifth()[0]["stages"].values()],
    }
    for name, (first, second) in rows.items():
        assert f"| {name} | {first:.2f} | {second:.2f} |\n" in MEASURED
    blocks = seconds(halves[1], "_to_128", "combine_", "sum_splits", "_scatter", "_count")
    assert f"| – | {blocks:.2f} |\n" in MEASURED
    dense = rows["full attention"][0] * 27 / 30
    assert f"27 layers take {blocks:.2f} s, and {dense:.2f} s with full attention" in PROSE
    idle = [1 - one / step for one, step in zip(rows["all kernels"], rows["a step without the profiler"], strict=True)]
    assert f"in {idle[1]:.2f} of a sparse step**, and in {idle[0]:.2f} of a step before" in PROSE
    assert f"has {int(spans[1][2]):,} and {int(spans[0][2]):,} kernels" in PROSE
    (calls,) = (int(calls) for _, calls, kernel in halves[1] if kernel == "backward_to_128")
    assert f"launched {calls / 27 / 4:.0f} times for each layer, sequence and pass" in PROSE
    groups = {(one["row"], one["tokens"]): one["both_ms"]["median"] for one in results("distilled-groups")}
    every = {one["row"]: one["both_ms"]["median"] for one in results("distilled-every")}
    layers = ("full", "msa:index_keys=group", "msa:mode=warmup,index_keys=group,kl_every=8")
    text = (
        "takes {:.1f} ms for both passes with full attention, {:.1f} with `msa` and an index key for each group, {:.1f}"
    )
    assert text.format(*(groups[row, 32_768] for row in layers)) in PROSE
    assert f"all groups the warm-up took [{every['msa:mode=warmup']:.1f}](" in PROSE


def test_what_a_selection_costs_before_training_is_what_its_file_says() -> None:
    rows = results("selection-split")
    cost = {(row["model"], row["label"]): row["loss"] for row in rows}
    gates = {key: loss["selector"][0] for key, loss in cost.items() if loss["selector"]}
    forced = [value for (_, label), value in gates.items() if "first" in label]
    free = [value for (_, label), value in gates.items() if "first" not in label]
    most = max(loss["budget"][0] for loss in cost.values())
    assert f"cost at most {most:.3f} nats of trailing loss at 8K and 32K" in QUALITY
    assert f"cost {min(free):.2f} to {max(free):.2f} nats more" in QUALITY
    assert f"forced, it is {min(forced):.2f} to {max(forced):.2f}" in QUALITY
    for sizes in ("512/8", "128/32", "64/32", "128/8"):
        labels = (sizes, f"{sizes} group", f"{sizes} group, first + previous")
        numbers = " | ".join(f"{gates[model, label]:.3f}" for model in ("published", "extended") for label in labels)
        assert re.search(rf"^\| {sizes} \| [0-9,]+ \| {re.escape(numbers)} \|$", MEASURED, re.MULTILINE), numbers
        for model in ("published", "extended"):
            assert gates[model, labels[2]] < 0.26 * gates[model, labels[1]]  # three quarters or more
