"""F7: long sequences from the first token on, or short ones first and then long ones with MoBA."""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

import moba_train.attention.registry  # noqa: F401  # attention kinds, which the recipe names
from benchmarks.plotting import BLUE, COLOURS, INK, band, spread
from experiments.comparison import ABOVE, Cell, Verdict, above, compare
from experiments.estimate import config_of
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL, moba, recipe, staged
from experiments.readings import (
    bucket_middles,
    loss_by_position,
    trailing_by_sequence,
    trailing_documents,
    trailing_loss,
    validation_loss,
)
from moba_train.config.load import load_config
from moba_train.memory.flops import real_flops
from moba_train.resolve.run import resolve_unchecked

RECIPES = Path(__file__).parents[1] / "configs" / "recipes" / "mini"
MINIATURES = {"": "128k-from-scratch", "4k-": "16k-from-scratch"}
"""Recipes in miniature with the long attention and length, 32K and 4K, by what the names of their arms begin with."""
TOKENS = 70_000_000
"""Training tokens of each arm that is compared at equal tokens."""
SHORT_LENGTH, SHORT_SHARE = 2048, 0.75
"""How the arms that begin short do so: tokens of a sequence, and the share of their training tokens."""
EQUAL_FLOPS = "-equal-flops"
SHORT = "short-then-long"
WORDS = {"full": "long, full", "moba": "long, MoBA", SHORT: "short full, then long MoBA"}
_COLOURS = COLOURS | {SHORT: BLUE}


class ShortFirst(Figure):
    """Long from scratch with MoBA, long from scratch with full attention, short full then long MoBA."""

    name = "short-first"
    title = "F7. Short first, or long from scratch"

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Three arms of equal tokens for each length, and at 32K two that have the FLOPs of full attention."""
        tokens = 8192 if quick else TOKENS
        budget = tokens * flops_per_token(_recipe("full", tokens, quick))
        names = [length + name for length in MINIATURES for name in WORDS]
        arms = [Arm(name, seed, _recipe(name, tokens, quick)) for name in names]
        for name in ("moba", SHORT):
            more = round(budget / flops_per_token(_recipe(name, tokens, quick)))
            arms.append(Arm(name + EQUAL_FLOPS, seed, _recipe(name, more, quick)))
        return arms

    def find(self, results: Sequence[Result]) -> Finding:
        """What beginning short gains or costs in the trailing loss, at equal tokens and at equal FLOPs."""
        verdicts: list[Verdict] = []
        for length, reference in product(MINIATURES, ("moba", "full")):
            # Within a length: a seed's held-out documents of 4K are not those of 32K.
            comparison = compare(_cells([one for one in results if split_name(one["name"])[0] == length]))
            for more, words in (("", "equal tokens"), (EQUAL_FLOPS, "equal FLOPs")):
                short, other = length + SHORT + more, length + reference + (more if reference != "full" else "")
                at = f"At {length or '32k-'}{words}".replace("k-", "K and ")
                claim = f"{at}, the trailing loss of {WORDS[SHORT]} is not above that of {WORDS[reference]}"
                verdicts += comparison.judge(claim, {short: 1.0, other: -1.0}, -math.inf, 0.0)
        return Finding(verdicts, _rows(results))

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Left: trailing loss by compute. Right: loss by position, a band over seeds."""
        left, right = canvas.subplots(1, 2)
        runs: dict[str, list[Result]] = {}
        for result in results:
            runs.setdefault(result["name"], []).append(result)
        for arm, own in runs.items():
            length, name = split_name(arm)
            equal_tokens = not arm.endswith(EQUAL_FLOPS)
            colour = _COLOURS[name]
            compute = statistics.mean(result["compute"]["real"] for result in own)
            dot: dict[str, Any] = {"marker": "s" if length else "o", "mfc": colour if equal_tokens else "none", "ms": 6}
            spread(left, list(map(trailing_loss, own)), compute, colour, upright=True, **dot)
            style = ":" if length else "-" if equal_tokens else "--"
            band(right, bucket_middles(own[0]) / 1024, list(map(loss_by_position, own)), colour, ls=style)
        for name, words in WORDS.items():
            left.plot([], [], "o", color=_COLOURS[name], label=words)
        left.plot([], [], "o", color=INK, mfc="none", label="dashed: FLOPs of full attention")
        left.plot([], [], "s", color=INK, label="dotted: long is 4K, not 32K")
        canvas.legend(loc="outside upper left", ncols=3)
        left.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        left.set_xlabel("PFLOP/s-days, real FLOPs")
        left.set_ylabel("trailing loss, nats")
        right.set_xlabel("position in the context, K tokens")
        right.set_ylabel("loss, nats")


def split_name(arm: str) -> tuple[str, str]:
    """The key of MINIATURES, and that of WORDS, of an arm's name."""
    length = next(length for length in reversed(MINIATURES) if arm.startswith(length))
    return length, arm.removeprefix(length).removesuffix(EQUAL_FLOPS)


@cache
def _miniature(name: str) -> tuple[dict[str, Any], int, int]:
    """Attention, length and batch of a recipe from scratch, in tokens."""
    config = load_config(RECIPES / f"{name}.yaml")
    given = config.model_dump(mode="json", exclude_unset=True)
    return given["attention"], config.stages[0].seq_len, config.batch_tokens


def _recipe(arm: str, tokens: int, quick: bool) -> dict[str, Any]:
    """The recipe of an arm that has `tokens` tokens in all."""
    miniature, name = split_name(arm)
    attention, length, batch = (moba(16, 2), 128, 1024) if quick else _miniature(MINIATURES[miniature])
    evaluation = {
        "sequences": 4 if quick else 64,
        "position_wise": {"bucket": length // 16, "sequences": 4 if quick else 64, "attention": "own"},
    }
    made = recipe("small" if quick else "10m", FULL if name == "full" else attention, length, tokens, batch, evaluation)
    made["stages"] = staged(length, tokens, 0.0)
    if name == SHORT:
        short = 32 if quick else SHORT_LENGTH
        before = round(SHORT_SHARE * tokens)
        (long,) = made["stages"]
        made["stages"] = [
            {"name": "short", "seq_len": short, "tokens": before, "attention": FULL},
            long | {"tokens": tokens - before},
        ]
    return made


def flops_per_token(made: dict[str, Any]) -> float:
    """Real FLOPs of a recipe for each of its tokens, forward and backward, with one document in each sequence."""
    config = config_of(Arm("estimate", 0, made))
    stages = resolve_unchecked(config).stages
    flops = sum(
        stage.planned_tokens * real_flops(config.model, stage.attention, [stage.seq_len]) / stage.seq_len
        for stage in stages
    )
    return flops / sum(stage.planned_tokens for stage in stages)


def _cells(results: Sequence[Result]) -> list[Cell]:
    return [
        Cell(
            result["name"],
            f"seed {result['seed']}",
            trailing_loss(result),
            trailing_by_sequence(result),
            trailing_documents(result),
        )
        for result in results
    ]


def _rows(results: Sequence[Result]) -> list[list[str]]:
    rows = [["arm", "seeds", "tokens", "real FLOPs, PFLOP/s-days", "trailing loss", *ABOVE, "validation loss"]]
    for name in dict.fromkeys(result["name"] for result in results):
        runs = [result for result in results if result["name"] == name]
        trailing, validation = (f"{statistics.mean(map(loss, runs)):.4f}" for loss in (trailing_loss, validation_loss))
        gap = above(_cells(results), name, f"{split_name(name)[0]}full")
        compute = statistics.mean(run["compute"]["real"] for run in runs)
        size = [str(len(runs)), f"{runs[0]['tokens'] / 1e6:.1f}M", f"{compute:.4g}"]
        rows.append([name, *size, trailing, *gap, validation])
    return rows
