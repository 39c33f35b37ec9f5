"""F2 and F3: loss of the last 2K of 32K tokens over compute, and loss by position."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from benchmarks.plotting import GREY, titled
from experiments import published
from experiments.comparison import Cell, Verdict, above, compare
from experiments.figure import Figure, Finding, Result
from experiments.fits import COLOURS, attention_and_size, paired, trend
from experiments.models import parameters
from experiments.readings import (
    Losses,
    bucket_middles,
    loss_by_position,
    own_trailing_by_sequence,
    position_wise,
    trailing_by_sequence,
    trailing_loss,
)
from experiments.scaling import ScalingFigure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

BOTH = "both"
"""Evaluation with both attentions, whichever the arm was trained with."""
RECALL = "recall"
"""Evaluation on held-out documents of synthetic recall: lookups, copies and variables over the whole context."""


class Trailing(ScalingFigure):
    """Loss of the last 2K of 32K tokens, MoBA and full attention, over compute."""

    name = "trailing"
    title = "F2. Trailing loss at 32K"
    claim = (
        "The same models at 32K, 95 % sparsity, last 2K tokens: 1.546 C^-0.108 with MoBA, 1.464 C^-0.097 with full "
        "attention; MoBA is slightly worse in all five, and the gap narrows with compute "
        "([MoBA](https://arxiv.org/abs/2502.13189), figure 3, section 3.1)."
    )
    setup = (
        "Four models of 4M to 15M parameters, 20 tokens for each, at 32K, blocks of 512, 3 of 64 selected. The "
        "largest model of F1 is left out for time: with full attention at 32K it takes 17 minutes of an H100, by "
        "estimate. Samples of the trailing loss lie inside one document. Every model is evaluated with both "
        "attentions, which F3 and F9 use."
    )
    result: ClassVar[str] = (
        "MoBA is behind at every size, as published, by 0.22 nats on average; whether the gap narrows with compute "
        "cannot be told"
    )
    found: ClassVar[tuple[str, ...]] = (
        "MoBA is behind at all four sizes and with both seeds, by 0.09 to 0.32 nats: 12, 16, 20 and 18 % from 4M to "
        "15M. The published fits, of models with 1,400 to 200,000 times the compute, say 3.7 to 6.6 % there, and 15 "
        "to 19 % if one extends them down to these.",
        "Whether the gap narrows with compute cannot be told: these sizes span a factor of 11 in compute, and the two "
        "gaps of the model of 4M, 0.09 and 0.32 nats, are further apart than those of the published fits at the "
        "smallest and the largest published model, 0.11 and 0.05.",
        "On documents of synthetic recall alone the gap is as large on average, 0.22 nats; of 4M with seed 0 there is "
        "none.",
        "In validation loss, over all positions, MoBA is behind, too, but in one pair, 4M with seed 0, where it is "
        "0.02 ahead.",
        "Of two pairs, 10M and 15M with seed 0, one arm was trained on an H100 and the other on an H200; in the "
        "others both were on the same kind.",
    )
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
    claim = (
        "Fits by position (table 3): from 3.075 C^-0.078 against 3.068 C^-0.078 in the first 2K to 1.546 C^-0.108 "
        "against 1.464 C^-0.097 in the last; trailing tokens account for most of the difference "
        "([MoBA](https://arxiv.org/abs/2502.13189), appendix A.1)."
    )
    setup = (
        "The largest models of F2 that both attentions have, on samples that lie inside one document, 2K a bucket. Of "
        "the last bucket alone the loss of each sample is kept, and with it the error of evaluation."
    )
    result: ClassVar[str] = "the gap grows with position, as published, to 0.20 nats in the last 2K"
    found: ClassVar[tuple[str, ...]] = (
        "Two seeds of 14.8M parameters, and the claim agrees, by little: the interval begins just above zero, as two "
        "seeds tell a spread badly. With seed 0 full attention was trained on an H100 and MoBA on an H200.",
        "The gap is 0.01 nats in the first 2K tokens, where MoBA sees all keys in three quarters of the positions, "
        "and 0.20 in the last. It grows otherwise than the published one: here more than half of it is there at 8K "
        "(0.12), there it is below 0.6 % up to 12K and grows behind that.",
        "In the last bucket the gap, in per cent of the loss, is five times that of the published fits at their "
        "largest compute, of a model 140 times as large.",
    )

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

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """Both curves, and their gap beside that of the published fits."""
        left, right = canvas.subplots(1, 2)
        pairs = largest_pairs(results)
        for pair in pairs:
            middles = bucket_middles(pair["full"])
            for name in ("full", "moba"):
                label = name if pair is pairs[0] else None
                left.plot(middles, loss_by_position(pair[name]), "-", lw=1.3, color=COLOURS[name], label=label)
            share = 100 * (loss_by_position(pair["moba"]) / loss_by_position(pair["full"]) - 1)
            here = "here" if pair is pairs[0] else None
            right.plot(middles, share, "o-", ms=3, lw=1.2, color=COLOURS["moba"], label=here)
            if here and position_wise(pair["full"])["bucket"] == published.POSITION_BUCKET:
                theirs = list(map(_published_gap, range(len(middles))))
                right.plot(middles, theirs, color=GREY, lw=1.3, label="published")
        for axes, title in ((left, "loss by position"), (right, "MoBA above full, %")):
            titled(axes, title, "position in the context, tokens")
            if pairs:
                axes.legend(frameon=False, labelcolor=GREY, fontsize=9)


def largest_pairs(results: Sequence[Result]) -> list[dict[str, Result]]:
    """MoBA and full attention of the largest size that has both, a pair for each seed."""
    by_size: dict[str, dict[int, dict[str, Result]]] = {}
    for result in results:
        attention, size = attention_and_size(result["name"])
        by_size.setdefault(size, {}).setdefault(result["seed"], {})[attention] = result
    for size in sorted(by_size, key=parameters, reverse=True):
        pairs = [pair for pair in by_size[size].values() if {"full", "moba"} <= pair.keys()]
        if pairs:
            return pairs
    return []


def _trailing_error(pairs: Sequence[dict[str, Result]]) -> str:
    """The error of evaluation alone of the gap in the last bucket, as a cell of a table."""
    cells = [
        Cell(name, f"seed {result['seed']}", trailing_loss(result), trailing_by_sequence(result))
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
