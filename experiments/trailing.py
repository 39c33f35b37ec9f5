"""F2 and F3: loss of the last 2K of 32K tokens over compute, and loss by position."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, COLOURS, MOBA, NAMES, band, name
from experiments import published
from experiments.comparison import Cell, Verdict, above, compare, mean_of
from experiments.figure import Figure, Finding, Result
from experiments.fits import attention_and_size, paired, trend
from experiments.models import parameters
from experiments.readings import (
    Losses,
    bucket_middles,
    loss_by_position,
    own_trailing_by_sequence,
    position_wise,
    trailing_by_sequence,
    trailing_documents,
    trailing_loss,
)
from experiments.scaling import ScalingFigure

BOTH = "both"
"""Evaluation with both attentions, whichever the arm was trained with."""
RECALL = "recall"
"""Evaluation on held-out documents of synthetic recall: lookups, copies and variables over the whole context."""


class Trailing(ScalingFigure):
    """Loss of the last 2K of 32K tokens, MoBA and full attention, over compute."""

    name = "trailing"
    title = "F2. Trailing loss at 32K"
    sizes = ("4m", "6m", "10m", "15m")
    seq_len = 32_768
    loss_name = "trailing loss"
    laws = published.TRAILING_32K
    evaluation = {"sequences": 32, "position_wise": {"bucket": 2048, "sequences": 128, "attention": "own"}}
    quick_evaluation = {"sequences": 4, "position_wise": {"bucket": 32, "sequences": 8, "attention": "own"}}

    def loss(self, result: Result) -> float:
        """Trailing loss."""
        return trailing_loss(result)

    def by_sequence(self, result: Result) -> Losses:
        """Trailing loss of each sequence."""
        return trailing_by_sequence(result)

    def evaluations(self, quick: bool) -> dict[str, Sequence[str]]:
        """MoBA and full attention on the same weights."""
        block = 16 if quick else self.block_size
        kind = ["attention.default=moba", f"attention.moba.block_size={block}", f"attention.moba.topk={self.topk}"]
        both = ["evaluation.position_wise.attention=both", "--tasks", "validation_loss,position_wise"]
        recall = {RECALL: ["--data", "recall-valid", "--tasks", "position_wise"]}
        return {BOTH: [*kind, *both], **({} if quick else recall)}

    def find(self, results: Sequence[Result]) -> Finding:
        """As for every scaling figure; and MoBA's last tokens beside full attention's when it has read a tenth."""
        found = super().find(results)
        pairs = [
            (loss_by_position(pair["full"])[1], trailing_loss(pair["moba"]))
            for pair in pairs_of(results)
            if len(loss_by_position(pair["full"])) > 1
        ]
        if len(pairs) < 2:
            return found
        early, late = np.array(pairs).T
        gap = mean_of((late - early).tolist())
        above = f"{int((late > early).sum())} of {len(pairs)} pairs"
        row = ["full's second bucket, MoBA's last", f"{early.mean():.4f}", f"{late.mean():.4f}", str(gap), above]
        return replace(found, rows=[*found.rows, row])

    def verdicts(self, results: Sequence[Result]) -> list[Verdict]:
        """The gap's sign and its trend; the sign on synthetic recall, too."""
        gap = {"moba": 1.0, "full": -1.0}
        comparison = compare(paired(results, trailing_loss, trailing_by_sequence))
        found = comparison.judge("MoBA's trailing loss is above full attention's", gap, 0.0, math.inf)
        if (slope := trend(results, trailing_loss)) is not None:
            found.append(Verdict("The gap shrinks with compute (slope for each factor of 10)", slope, -math.inf, 0.0))
        recalled = [result for result in results if RECALL in result["evaluations"]]
        comparison = compare(paired(recalled, recall_loss, recall_by_sequence))
        claim = "On synthetic recall, too, MoBA's trailing loss is above full attention's"
        return found + comparison.judge(claim, gap, 0.0, math.inf)


def recall_loss(result: Result) -> float:
    """Trailing loss on synthetic recall, with the attention that the arm was trained with."""
    data = result["evaluations"][RECALL]["position_wise"]
    return float(data["curves"][data["attention"]]["mean"][-1])


def recall_by_sequence(result: Result) -> Losses:
    """Trailing loss of each sequence of synthetic recall."""
    return own_trailing_by_sequence(result["evaluations"][RECALL]["position_wise"])


class Position(Figure):
    """Loss by position in the context, of the largest models of `trailing`."""

    name = "position"
    source = "trailing"
    title = "F3. Loss by position"

    def find(self, results: Sequence[Result]) -> Finding:
        """The gap by position, and whether it grows."""
        pairs = largest_pairs(results)
        if not pairs:
            return Finding([], [["tokens", "full", "MoBA", "gap"]])
        full, moba = (np.array([loss_by_position(pair[name]) for pair in pairs]) for name in ("full", "moba"))
        gaps = moba - full
        bucket = int(position_wise(pairs[0]["full"])["bucket"])
        rows = [["tokens", "full", "MoBA", "gap", "± evaluation", "published gap, %", "gap here, %"]]
        error = _trailing_error(pairs)
        for index, gap in enumerate(gaps.mean(0)):
            cells = [f"{full[:, index].mean():.4f}", f"{moba[:, index].mean():.4f}", f"{gap:+.4f}"]
            cells.append(error if index == gaps.shape[1] - 1 else "–")
            shares = [_published_share(index, bucket), f"{100 * gap / full[:, index].mean():+.2f}"]
            rows.append([f"{index * bucket} to {(index + 1) * bucket}", *cells, *shares])
        ends = [
            Cell(where, f"seed {pair['full']['seed']}", float(gap[index]))
            for pair, gap in zip(pairs, gaps, strict=True)
            for where, index in (("first", 0), ("last", -1))
        ]
        growth = compare(ends).difference("last", "first")
        claim = "The gap in the last bucket is larger than in the first"
        return Finding([Verdict(claim, growth, 0.0, math.inf)], rows, {"gap": gaps.mean(0).tolist()})

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Both curves, and their gap beside that of the published fits; bands over seeds."""
        left, right = canvas.subplots(1, 2)
        pairs = largest_pairs(results)
        for axes, label in ((left, "loss, nats"), (right, "MoBA above full attention, %")):
            axes.set_xlabel("position in the context, K tokens")
            axes.set_ylabel(label)
        if not pairs:
            return
        middles = bucket_middles(pairs[0]["full"]) / 1024
        curves = {kind: np.array([loss_by_position(pair[kind]) for pair in pairs]) for kind in COLOURS}
        for kind, colour in COLOURS.items():
            band(left, middles, curves[kind], colour)
            name(left, NAMES[kind], (middles[-1], curves[kind].mean(0)[-1]), colour)
        shares = 100 * (curves["moba"] / curves["full"] - 1)
        band(right, middles, shares, MOBA)
        name(right, "here", (middles[-1], shares.mean(0)[-1]), MOBA)
        if position_wise(pairs[0]["full"])["bucket"] == published.POSITION_BUCKET:
            theirs = list(map(_published_gap, range(len(middles))))
            right.plot(middles, theirs, color=BLUE)
            name(right, "published", (middles[-1], theirs[-1]), BLUE)


def pairs_of(results: Sequence[Result]) -> list[dict[str, Result]]:
    """MoBA and full attention by name, for each size and seed that have both."""
    by_block: dict[tuple[str, int], dict[str, Result]] = {}
    for result in results:
        attention, size = attention_and_size(result["name"])
        by_block.setdefault((size, result["seed"]), {})[attention] = result
    return [pair for pair in by_block.values() if {"full", "moba"} <= pair.keys()]


def largest_pairs(results: Sequence[Result]) -> list[dict[str, Result]]:
    """MoBA and full attention of the largest size that has both, a pair for each seed."""

    def size_of(pair: dict[str, Result]) -> int:
        return parameters(attention_and_size(pair["full"]["name"])[1])

    pairs = pairs_of(results)
    largest = max(map(size_of, pairs), default=0)
    return [pair for pair in pairs if size_of(pair) == largest]


def _trailing_error(pairs: Sequence[dict[str, Result]]) -> str:
    """The error of evaluation alone of the gap in the last bucket, as a cell of a table."""
    cells = [
        Cell(
            name,
            f"seed {result['seed']}",
            trailing_loss(result),
            trailing_by_sequence(result),
            trailing_documents(result),
        )
        for pair in pairs
        for name, result in pair.items()
    ]
    _, error = above(cells, "moba", "full")
    return error


def _published_gap(index: int) -> float:
    """Gap of the published fits in a bucket at the largest published compute, in % of full attention's loss."""
    compute = max(published.TRAINED_COMPUTE)
    return 100 * (published.POSITION_32K["moba"][index](compute) / published.POSITION_32K["full"][index](compute) - 1)


def _published_share(index: int, bucket: int) -> str:
    return f"{_published_gap(index):+.2f}" if bucket == published.POSITION_BUCKET else "–"
