"""F15: a model that retrieves over 32K tokens with full attention, converted to MoBA and to a window.

SmolLM2-135M learns to find needles in 32K tokens with full attention first. It then goes on for some tokens with each
attention in all layers but the last three, and is asked with that attention, with full attention, and in the mode of
the MoBA paper: the text read with its own attention, question and answer with full attention.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, FULL, GREEN, MOBA, spread
from experiments.comparison import Cell, Verdict, compare
from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import moba
from experiments.needle_documents import SHARE, needle_corpus, write_needles
from experiments.readings import keys_text, last_stage
from experiments.smollm2 import (
    ANSWERS,
    BASE_LR,
    BATCH_TOKENS,
    FULL_ATTENTION,
    LR,
    QUICK_LENGTH,
    QUICK_SPARSE,
    SCORED,
    SPARSE,
    THETA,
    asked,
    by_position,
    from_weights,
    mean,
    need_weights,
    needles,
    needles_found,
    recipe,
    trailing,
)

SEQ_LEN = 32_768
BASE = "base"
ROPE_TOKENS = 4_194_304
MOST_TOKENS = 33_554_432
CONVERSION_TOKENS = 8_388_608
BAR = 0.9
"""Share of needles that the base has to find with full attention before anything is converted."""
ATTENTION: dict[str, dict[str, Any]] = {
    "full": FULL_ATTENTION,
    "moba-128": SPARSE["moba"],
    "moba-512": {**moba(512, 4), "full_layers": "last:3"},
    "window": SPARSE["window"],
}
QUICK: dict[str, dict[str, Any]] = {"full": FULL_ATTENTION, "moba-128": QUICK_SPARSE["moba"]}
NAMES = {"full": "full attention", "moba-128": "MoBA 128/16", "moba-512": "MoBA 512/4", "window": "window of 2,048"}
MODES = {"own": "own", "answers": "text own, answer full", "full": "full"}
_COLOURS = dict(zip(MODES, (MOBA, BLUE, FULL), strict=True))


class Conversion(Figure):
    """A model that retrieves with full attention, converted to MoBA and to a window."""

    name = "conversion"
    corpus: ClassVar[str] = "data/smollm2-long"
    title = "F15. Conversion of a model that retrieves"
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The base, then an arm for each attention."""
        added = {needle_corpus(QUICK_LENGTH if quick else SEQ_LEN): SHARE}
        arms = [Arm(BASE, seed, _base(quick), added=added)]
        for name, attention in (QUICK if quick else ATTENTION).items():
            found = {
                "position_wise": by_position(SCORED // SEQ_LEN, quick),
                "needle": needles([8192, 16_384, SEQ_LEN], 8, quick),
            }
            last = {ANSWERS: asked("full" if name == "full" else "both", found)}
            arms.append(Arm(name, seed, _converted(attention, quick), last, added, parent=BASE))
        return arms

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Documents with hidden numbers. Raises UserError where the corpus' folder lacks the weights."""
        if not quick:
            need_weights(corpus)
        length, tokens = (QUICK_LENGTH, 1 << 15) if quick else (SEQ_LEN, int(SHARE * MOST_TOKENS))
        write_needles(corpus, folder, length, tokens)

    def refuses(self, parent: Result, quick: bool) -> str:
        """Nothing is converted that does not retrieve, except where it was given seconds to learn it."""
        found = last_needle(parent)
        return "" if quick or found >= BAR else f"the base of seed {parent['seed']} finds {found:.2f}; the bar is {BAR}"

    def find(self, results: Sequence[Result]) -> Finding:
        """A row for each arm."""
        heads = ["needles at once", *(f"needles, {mode}" for mode in MODES.values())]
        rows = [["arm", "mean keys", *heads, "last 2K, own", "run with full", "seeds"]]
        converted = [result for result in results if ANSWERS in result["evaluations"]]
        for name in dict.fromkeys(result["name"] for result in converted):
            own = [result for result in converted if result["name"] == name]
            shares = [mean(own, functools.partial(found_in, mode=mode)) for mode in MODES]
            losses = [mean(own, functools.partial(loss_in, mode=mode)) for mode in ("own", "full")]
            rows.append([NAMES[name], keys_text(own[0]), mean(own, at_once), *shares, *losses, str(len(own))])
        for base in (one for one in results if one["name"] == BASE):
            passed = "" if last_needle(base) >= BAR else ": FAILS"
            rows.append([f"**base, seed {base['seed']}{passed}**", "all", f"{last_needle(base):.2f}", *["–"] * 6])
        return Finding(_verdicts(converted), rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Needles by arm and mode; bands over seeds."""
        axes = canvas.subplots()
        arms = [name for name in NAMES if any(one["name"] == name for one in results)]
        for place, name in enumerate(arms):
            own = [one for one in results if one["name"] == name and ANSWERS in one["evaluations"]]
            for offset, (mode, label) in zip((-0.2, 0.0, 0.2), MODES.items(), strict=True):
                shares = [share for one in own if math.isfinite(share := found_in(one, mode))]
                if shares:
                    spread(axes, shares, place + offset, _COLOURS[mode], width=6)
                if not place:
                    axes.plot([], [], "o", label=label, color=_COLOURS[mode])
        axes.axvline(BAR, color=GREEN, lw=0.8)
        axes.set_yticks(range(len(arms)), [NAMES[name] for name in arms])
        axes.invert_yaxis()
        axes.set_xlabel("share of needles found after conversion")
        canvas.legend(loc="outside upper left", ncols=len(MODES))


def _base(quick: bool) -> dict[str, Any]:
    """The published weights through the change of RoPE, then long sequences until needles are found."""
    seq_len = QUICK_LENGTH if quick else SEQ_LEN
    rope = {"kind": "abf", "theta": THETA}
    short = {
        "name": "rope",
        "seq_len": seq_len // 4,
        "tokens": 2 * seq_len if quick else ROPE_TOKENS,
        "evaluate": False,
    }
    until = {"metric": "needle", "at_least": BAR, "max_tokens": 4 * seq_len if quick else MOST_TOKENS}
    long = {"name": "long", "seq_len": seq_len, "tokens": 2 * seq_len if quick else BATCH_TOKENS * 64, "until": until}
    # In a fixed order, one document takes half the time of packed ones (benchmarks/measured/health.md, "Determinism").
    long["micro_batch_size"] = 1
    stages = [{**short, "rope": rope}, {**long, "rope": rope}]
    content = from_weights(recipe(FULL_ATTENTION, stages, BASE_LR, quick, _evaluation(quick)), quick)
    content["optim"]["schedule"]["kind"] = "constant"
    return content


def _converted(attention: Mapping[str, Any], quick: bool) -> dict[str, Any]:
    seq_len = QUICK_LENGTH if quick else SEQ_LEN
    stage = {"name": "convert", "seq_len": seq_len, "tokens": 2 * seq_len if quick else CONVERSION_TOKENS}
    return recipe(attention, [stage], LR, quick, _evaluation(quick) | {"at_start": True})


def _evaluation(quick: bool) -> dict[str, Any]:
    """The evaluations while an arm is trained."""
    needle = (
        {"lengths": [QUICK_LENGTH], "depths": [0, 50], "samples": 1}
        if quick
        else {"depths": [0, 25, 50, 75], "samples": 4}
    )
    return {
        "every": 1 if quick else 32,
        "sequences": 2,
        "position_wise": by_position(8, quick) | {"attention": "own"},
        "needle": {**needle, "attention": "own"},
    }


def last_needle(result: Result) -> float:
    """Share of needles at the end of training, with the arm's own attention."""
    return float(last_stage(result)["needle"]["needle"])


def at_once(result: Result) -> float:
    """Share of needles before the first step of the conversion."""
    return float(next(one["needle"] for one in result["history"] if one["evaluation"] == "needle"))


def found_in(result: Result, mode: str) -> float:
    """Share of needles after the conversion; the own attention of the arm with full attention is full."""
    return needles_found(result, "full" if result["name"] == "full" else mode)


def loss_in(result: Result, mode: str) -> float:
    """Trailing loss after the conversion, likewise."""
    return trailing(result, "full" if result["name"] == "full" else mode)


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Claims that were written down before the first arm was trained."""
    own, answers = (
        compare([Cell(one["name"], f"seed {one['seed']}", found_in(one, mode)) for one in results])
        for mode in ("own", "answers")
    )
    found = []
    for comparison, arm, other, low, claim in (
        (own, "moba-128", "full", -0.1, "MoBA 128/16 finds at most 0.1 fewer of the needles than full attention"),
        (own, "moba-128", "window", 0.1, "MoBA 128/16 finds at least 0.1 more of the needles than a window"),
        (own, "moba-128", "moba-512", 0.1, "Blocks of 128 find at least 0.1 more of the needles than blocks of 512"),
        (answers, "moba-128", "full", -0.05, "If it answers with full attention, MoBA 128/16 finds at most 0.05 fewer"),
    ):
        found += comparison.judge(claim, {arm: 1.0, other: -1.0}, low, math.inf)
    return found
