"""F13: MoBA, full attention, a sliding window and short sequences first, each for equal seconds on one GPU.

SmolLM2-135M is extended to long sequences. Rates are measured first, by the figure `equal-time-rates` on the same kind
of GPU, and give each arm its tokens: as many as it trains in `seconds_per_arm`. So arms may share a GPU. Those of one
seed begin with the same weights, which have been through the change of RoPE already.

    full     full attention throughout
    moba     MoBA 128/16 with the last 3 layers full for 88 % of the time, then full attention
    early    the same, MoBA for 60 % of the time
    window   a window of 2,048 tokens and 64 sinks in the same layers and for the same tokens as `moba`, then full
    short    full attention, at 8K for 60 % of the time
"""

import dataclasses
import functools
import math
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, FULL, GREEN, MOBA, PURPLE, band, powers_of_two, spread, zero_line
from benchmarks.plotting import name as write_name
from experiments.comparison import ABOVE, Cell, Verdict, above, compare
from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.results import read_results
from experiments.smollm2 import (
    ANSWERS,
    BASE_LR,
    FULL_ATTENTION,
    LR,
    OTHER,
    QUICK_LENGTH,
    QUICK_SPARSE,
    SCORED,
    SPARSE,
    THETA,
    asked,
    attention_of,
    batch_tokens,
    by_position,
    from_weights,
    mean,
    need_weights,
    needles,
    needles_found,
    recipe,
    trailing,
)
from moba_train.data.indexed import corpus_file
from moba_train.errors import UserError

SECONDS = 200
"""Training seconds of an arm: the arms of a seed at 64K are then trained and evaluated in 25 minutes of one GPU."""
MICRO_BATCH = 65_536
"""Tokens of a micro-batch, so that the memory of a GPU is enough for three arms at 64K (a plan says 39 GiB each)."""
LENGTHS = {"32k": 32_768, "64k": 65_536, "128k": 131_072}
MAIN = "64k"
SHORT = 8192
BASE = "base"
BASE_TOKENS = 4_194_304
SPARSE_SHARE = 0.88
SHORT_SHARE = 0.6
"""Shares of an arm's time: with sparse attention, and at the short length or, of `early`, with MoBA."""
SELECTED_KEYS = 2048
"""Keys of MoBA 128/16, which is full attention in shorter texts: no needle is hidden in these."""
SEEDS = (0, 1, 2)
OTHER_SEEDS = (0, 1)
"""Seeds at 64K, and at the other lengths."""
PROBE = "probe"
"""Evaluation of the last checkpoint, next to `ANSWERS` and `OTHER`."""
RATE_STEPS = 12
NAMES = {
    "full": "full throughout",
    "moba": "MoBA, then full",
    "early": "MoBA for 60 %, then full",
    "window": "window, then full",
    "short": "8K first",
}
_COLOURS = {"full": FULL, "moba": MOBA, "early": PURPLE, "window": GREEN, "short": BLUE}
NOMINAL_RATES = {
    **{"full-8k": 160e3, "full-32k": 74e3, "full-64k": 41e3, "full-128k": 22e3},
    **{"moba-32k": 100e3, "moba-64k": 92e3, "moba-128k": 80e3, "window-64k": 100e3},
}
"""Tokens a second, for lists and estimates before rates are measured; no arm runs with them."""
_RATES = Path(__file__).parent / "results" / "equal-time-rates.json"


class EqualTimeRates(Figure):
    """Tokens a second of the stages of `equal-time`, each alone on its GPU."""

    name = "equal-time-rates"
    corpus: ClassVar[str] = "data/smollm2-long"
    title = "F13. Rates of the stages"
    seeds: ClassVar[tuple[int, ...]] = (0,)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Some steps of each kind and length, timed alone."""
        names = ("full-64k", "moba-64k") if quick else NOMINAL_RATES
        return [_timed(name, seed, quick) for name in names]

    def find(self, results: Sequence[Result]) -> Finding:
        """A row for each."""
        rows = [["stage", "tokens a second", "of full attention at this length"]]
        rates = {result["name"]: result["tokens_per_s"] for result in results}
        for name, rate in rates.items():
            full = rates.get(f"full-{name.partition('-')[2]}")
            rows.append([name, f"{rate:,.0f}", f"{rate / full:.2f}" if full else "–"])
        return Finding([], rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Rates over lengths."""
        axes = canvas.subplots()
        found: set[int] = set()
        for kind, label in (("full", "full attention"), ("moba", "MoBA 128/16"), ("window", "window of 2,048")):
            own = [one for one in results if _kind(one) == kind]
            rates = {one["recipe"]["stages"][-1]["seq_len"]: one["tokens_per_s"] / 1000 for one in own}
            places = sorted(rates)
            axes.plot(places, [rates[length] for length in places], "o-", color=_COLOURS[kind])
            if places:
                write_name(axes, label, (places[-1], rates[places[-1]]), _COLOURS[kind])
            found.update(places)
        powers_of_two(axes, sorted(found))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of a sequence")
        axes.set_ylabel("thousand tokens a second")


@dataclasses.dataclass(frozen=True)
class EqualTime(Figure):
    """MoBA, full attention, a window and short sequences first, for equal seconds at 32K, 64K and 128K."""

    name = "equal-time"
    corpus: ClassVar[str] = "data/smollm2-long"
    title = "F13. From which length MoBA pays in time"
    seeds: ClassVar[tuple[int, ...]] = SEEDS
    seconds_per_arm: int = SECONDS
    """Training seconds of an arm by the measured rates. Results of different settings are not mixed."""

    def with_seconds_per_arm(self, seconds: int) -> "EqualTime":
        """The figure with arms of this length. Raises UserError for one that is not positive."""
        if seconds < 1:
            raise UserError(f"--seconds-per-arm: given {seconds}, allowed: at least 1")
        return dataclasses.replace(self, seconds_per_arm=seconds)

    def settings(self, quick: bool) -> dict[str, Any]:
        """Length of an arm. The rates that gave it its tokens are in its recipe, as those tokens."""
        return {"seconds_per_arm": self.seconds_per_arm}

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The base, then all arms at 64K, then full attention and MoBA at the other lengths."""
        make = functools.partial(self._arm, seed=seed, quick=quick)
        found = [_base(seed, quick), *(make(kind, MAIN) for kind in NAMES)]
        if not quick:
            others = [length for length in LENGTHS if length != MAIN]
            found += [make(kind, length) for length in others for kind in ("full", "moba")]
        return found

    def refusal(self, arm: Arm, results: Sequence[Result], quick: bool) -> str:
        """Lengths other than 64K have fewer seeds, and an arm has as many tokens as measured rates give it."""
        kind, _, length = arm.name.partition("-")
        if arm.seed not in OTHER_SEEDS and length not in ("", MAIN):
            return f"lengths other than {MAIN} have the seeds {', '.join(map(str, OTHER_SEEDS))}"
        if kind in NAMES and not quick:
            sparse = {"full": [], "short": ["full-8k"]}.get(kind, [f"moba-{length}"])  # a window has MoBA's tokens
            measured = {result["name"] for result in read_results(_RATES)}
            if missing := {f"full-{length}", *sparse} - measured:
                return f"equal-time-rates has no rates of {', '.join(sorted(missing))}"
        return super().refusal(arm, results, quick)

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Check what the figure needs: rates of this device, weights, and the held-out domain. The quick form makes a
        held-out domain of its validation text. Raises UserError, with what to do, where something is missing."""
        if quick:
            for suffix in ("bin", "idx"):
                shutil.copy(corpus_file(corpus.find("valid"), suffix), corpus_file(folder / OTHER, suffix))
            return
        need_weights(corpus)
        corpus.find(OTHER)
        here = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
        if {result["device"] for result in read_results(_RATES)} != {here}:
            raise UserError(
                f"{_RATES.name}: no rates on {here}, or some of another device; measure them first: python -m "
                f"experiments equal-time-rates --corpus {corpus.folder} --gpus 1"
            )

    def find(self, results: Sequence[Result]) -> Finding:
        """A row for each arm, and the claims."""
        losses = ["last 2K, run with full", *ABOVE, "own", "other domain"]
        found = ["needles, full", "own", "text own, answer full", "RULER, full", "mass recall"]
        rows = [["arm", "tokens", *losses, *found, "seeds"]]
        trained = [result for result in results if ANSWERS in result["evaluations"]]
        cells = _cells(trained)
        for name in dict.fromkeys(result["name"] for result in trained):
            own = [result for result in trained if result["name"] == name]
            losses = [mean(own, functools.partial(trailing, mode=mode)) for mode in ("full", "own")]
            gap = above(cells, name, _full(name))
            shares = [mean(own, functools.partial(needles_found, mode=mode)) for mode in ("full", "own", "answers")]
            others = [mean(own, value) for value in (ruler_score, mass_recall)]
            losses.append(mean(own, other_domain))
            tokens = f"{own[0]['tokens'] / 1e6:.1f}M"
            rows.append([name, tokens, losses[0], *gap, *losses[1:], *shares, *others, str(len(own))])
        return Finding(_verdicts(trained), rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Loss of the last 2K at 64K above that at the end of full attention, over seconds and over tokens, and MoBA's
        distance from full attention by length, if there are several; bands over seeds."""
        trained = [result for result in results if ANSWERS in result["evaluations"]]
        gaps = {
            length: [gap for one in trained if (gap := _gap(one, trained, f"moba-{length}")) is not None]
            for length in LENGTHS
        }
        by_length = sum(map(bool, gaps.values())) > 1
        panels = canvas.subplots(1, 2 + by_length, width_ratios=(3, 3, 2)[: 2 + by_length])
        ends = {one["seed"]: learning_curve(one, "tokens")[-1][1] for one in trained if one["name"] == f"full-{MAIN}"}
        for kind, label in NAMES.items():
            own = [one for one in trained if one["name"] == f"{kind}-{MAIN}" and one["seed"] in ends]
            for axes, unit in zip(panels[:2], ("seconds", "tokens"), strict=True):
                curves = [learning_curve(one, unit) for one in own]
                points = min(map(len, curves), default=0)
                if points:
                    x = [place for place, _ in curves[0][:points]]
                    above_full = [
                        [loss - ends[one["seed"]] for _, loss in curve[:points]]
                        for one, curve in zip(own, curves, strict=True)
                    ]
                    named = label.removesuffix(", then full")
                    band(axes, x, above_full, _COLOURS[kind], named, marker="o" if points == 1 else "")
        for axes, label in zip(panels[:2], ("seconds, by rates", "million tokens"), strict=True):
            axes.set_xlabel(f"{MAIN.upper()}: {label}")
            axes.set_xlim(left=0)
            zero_line(axes)
        panels[0].set_ylabel("nats above full's end")
        if by_length:
            for place, found in enumerate(gaps.values()):
                if found:
                    spread(panels[2], found, place, MOBA, upright=True)
            zero_line(panels[2])
            panels[2].set_xticks(range(len(LENGTHS)), [length.upper() for length in LENGTHS])
            panels[2].set_xlim(-0.5, len(LENGTHS) - 0.5)
            panels[2].set_ylabel("MoBA above full, nats")
        canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(NAMES))

    def _arm(self, kind: str, length: str, seed: int, quick: bool) -> Arm:
        seq_len = QUICK_LENGTH if quick else LENGTHS[length]
        sparse = (QUICK_SPARSE if quick else SPARSE).get(_attention(kind))
        attention = sparse or FULL_ATTENTION
        stages = [self._stage(*one, quick) for one in self._plan(kind, length, seq_len, quick)]
        steps = sum(stage["tokens"] for stage in stages) // batch_tokens(quick)
        evaluation = {
            "every": max(1, -(-steps // 5)),
            "sequences": 2,
            "position_wise": by_position(SCORED // 4 // seq_len, quick) | {"attention": "own"},
        }
        content = recipe(attention, stages, LR, quick, evaluation)
        answers = _answers(seq_len, quick)
        found = {
            ANSWERS: asked("full" if sparse is None else "both", answers),
            OTHER: asked("full", {"position_wise": answers["position_wise"]}, "--data", OTHER),
        }
        if kind == "moba":  # whose last stage has full attention, which has no gate
            gates = {"gate_probe": {"sequences": 1 if quick else 4}}
            found[PROBE] = asked("own", gates, "stages.1.attention.default=moba")
        return Arm(f"{kind}-{length}", seed, content, found, parent=BASE)

    def _plan(
        self, kind: str, length: str, seq_len: int, quick: bool
    ) -> Iterator[tuple[str, int, float, dict[str, Any] | None]]:
        """Name, length, tokens and attention (None: the recipe's) of each stage."""
        rates = _rates(quick)
        seconds = self.seconds_per_arm
        full = rates[f"full-{length}"]
        if kind == "full":
            yield "full", seq_len, seconds * full, None
        elif kind == "short":
            yield "short", seq_len // 8 if quick else SHORT, SHORT_SHARE * seconds * rates["full-8k"], None
            yield "full", seq_len, (1 - SHORT_SHARE) * seconds * full, None
        else:  # a window has the tokens of MoBA
            share = SHORT_SHARE if kind == "early" else SPARSE_SHARE
            yield "sparse", seq_len, share * seconds * rates[f"moba-{length}"], None
            yield "full", seq_len, (1 - share) * seconds * full, FULL_ATTENTION

    def _stage(
        self, name: str, seq_len: int, tokens: float, attention: dict[str, Any] | None, quick: bool
    ) -> dict[str, Any]:
        batch = batch_tokens(quick)
        own = {} if attention is None else {"attention": attention}
        tokens = max(1, round(tokens / batch)) * batch
        return {**_stage(name, seq_len, tokens, quick), **own, "evaluate": name != "short"}


def _rates(quick: bool) -> dict[str, float]:
    """Tokens a second by kind and length: measured, else those of estimates."""
    if quick:  # a step or two of each stage
        return dict.fromkeys(NOMINAL_RATES, 2 * QUICK_LENGTH / 1200)
    return NOMINAL_RATES | {result["name"]: float(result["tokens_per_s"]) for result in read_results(_RATES)}


def _base(seed: int, quick: bool) -> Arm:
    """The published weights after the change of RoPE, at the length that they know."""
    seq_len = QUICK_LENGTH // 8 if quick else SHORT
    tokens = 4 * QUICK_LENGTH if quick else BASE_TOKENS
    rope = {"kind": "abf", "theta": THETA}
    stage = {"name": "rope", "seq_len": seq_len, "tokens": tokens, "rope": rope, "evaluate": False}
    return Arm(BASE, seed, from_weights(recipe(FULL_ATTENTION, [stage], BASE_LR, quick, {}), quick))


def _stage(name: str, seq_len: int, tokens: int, quick: bool) -> dict[str, Any]:
    micro_batch = max(1, min(batch_tokens(quick), MICRO_BATCH) // seq_len)
    return {"name": name, "seq_len": seq_len, "tokens": tokens, "micro_batch_size": micro_batch, "evaluate": False}


def _timed(name: str, seed: int, quick: bool) -> Arm:
    """Some steps of a kind at a length."""
    kind, _, length = name.partition("-")
    seq_len = QUICK_LENGTH if quick else {"8k": SHORT, **LENGTHS}[length]
    tokens = (2 if quick else RATE_STEPS) * batch_tokens(quick)
    stage = _stage("timed", seq_len, tokens, quick)
    attention = (QUICK_SPARSE if quick else SPARSE).get(kind, FULL_ATTENTION)
    return Arm(name, seed, recipe(attention, [stage], LR, quick, {}), is_timed=True)


def _answers(seq_len: int, quick: bool) -> dict[str, dict[str, Any]]:
    """The evaluations at the end."""
    halved = (seq_len >> halvings for halvings in range(4, -1, -1))
    ruler = {"tasks": ["niah_multikey_2", "vt", "niah_single_3"], "samples": SCORED // 4 // seq_len}
    if quick:
        ruler = {"tasks": ["niah_single_3"], "samples": 1}
    return {
        "position_wise": by_position(SCORED // seq_len, quick),
        "needle": needles([length for length in halved if length > SELECTED_KEYS], SCORED // 16 // seq_len, quick),
        "ruler": {**ruler, "lengths": [seq_len], "answer": "full"},
    }


def _kind(result: Result) -> str:
    return str(result["name"]).partition("-")[0]


def _attention(kind: str) -> str:
    """The attention of an arm's first stage."""
    return "moba" if kind == "early" else kind


def other_domain(result: Result) -> float:
    """Loss of the last 2K tokens of the held-out domain, run with full attention."""
    return float(result["evaluations"][OTHER]["position_wise"]["curves"]["full"]["mean"][-1])


def ruler_score(result: Result) -> float:
    """Mean of RULER's tasks, run with full attention."""
    by_task = result["evaluations"][ANSWERS]["ruler"]["scores"]["full"]["teacher_forced"]
    return statistics.mean(statistics.mean(scores) for scores in by_task.values())


def mass_recall(result: Result) -> float:
    """Share of full attention's probability in the blocks that the gates select, mean over layers; NaN without any."""
    layers = result["evaluations"].get(PROBE, {}).get("gate_probe", {}).get("layers", [])
    return statistics.mean(layer["mass_recall"] for layer in layers) if layers else math.nan


def learning_curve(result: Result, unit: str) -> list[tuple[float, float]]:
    """Trailing loss in training, over seconds by the rates that gave the arm its tokens, or over million tokens."""
    rates = _rates(quick="vocab_size" not in result["recipe"]["model"])
    kind, _, length = result["name"].partition("-")
    ends = []
    seconds = tokens = 0.0
    for stage in result["recipe"]["stages"]:
        name = {"sparse": f"{_attention(kind)}-{length}", "short": "full-8k"}.get(stage["name"], f"full-{length}")
        ends.append((tokens, seconds, rates[name]))
        tokens += stage["tokens"]
        seconds += stage["tokens"] / rates[name]
    found = []
    for one in result["history"]:
        if one["evaluation"] == "position_wise":
            first, before, rate = [end for end in ends if end[0] < one["tokens"]][-1]
            at = one["tokens"] / 1e6 if unit == "tokens" else before + (one["tokens"] - first) / rate
            found.append((at, float(one["trailing_loss"])))
    return found


def _full(name: str) -> str:
    """The arm with full attention throughout of the same length as `name`."""
    return f"full-{name.partition('-')[2]}"


def _gap(result: Result, results: Sequence[Result], name: str) -> float | None:
    """Trailing loss of the arm `name` above that of full attention with its length and seed, both run with full."""
    partner = (one for one in results if (one["name"], one["seed"]) == (_full(name), result["seed"]))
    other = next(partner, None) if result["name"] == name else None
    return None if other is None else trailing(result, "full") - trailing(other, "full")


def _cells(results: Sequence[Result], mode: str = "full") -> list[Cell]:
    """Trailing losses by arm, in blocks of a length and a seed: lengths have a spread in common and nothing else."""
    found = []
    for result in results:
        data = result["evaluations"][ANSWERS]["position_wise"]
        name = attention_of(list(data["curves"]), mode)
        if name is not None:
            block = f"{result['name'].partition('-')[2]}, seed {result['seed']}"
            losses = data["curves"][name]["trailing_by_sequence"]
            found.append(Cell(result["name"], block, trailing(result, mode), losses, data.get("documents", ())))
    return found


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Claims that were written down before the first arm was trained, those of `early` before its own."""
    claims = [
        *(("moba", length, "full", -0.01, "is at least 0.01 below full throughout") for length in LENGTHS),
        ("moba", MAIN, "short", 0.01, "is not above 8K first by 0.01"),
        ("moba", MAIN, "window", -0.01, "is at least 0.01 below a window, then full"),
        ("early", MAIN, "full", 0.01, "is not above full throughout by 0.01"),
        ("early", MAIN, "moba", 0.0, "is below MoBA, then full"),
    ]
    losses = compare(_cells(results))
    found = []
    for kind, length, other, high, claim in claims:
        weights = {f"{kind}-{length}": 1.0, f"{other}-{length}": -1.0}
        found += losses.judge(f"At {length.upper()}, {NAMES[kind]}, {claim}", weights, -math.inf, high)
    moba, window = (f"{kind}-{MAIN}" for kind in ("moba", "window"))
    at = f"At {MAIN.upper()}, MoBA, then full,"
    shares = [
        Cell(one["name"], f"seed {one['seed']}", needles_found(one, "full"))
        for one in results
        if one["name"].endswith(f"-{MAIN}")
    ]
    claim = f"{at} finds at least 0.1 more of the needles than a window, then full"
    found += compare(shares).judge(claim, {moba: 1.0, window: -1.0}, 0.1, math.inf)
    runs = [cell._replace(arm=mode) for mode in ("own", "full") for cell in _cells(results, mode) if cell.arm == moba]
    claim = f"{at} run with MoBA is within 0.02 of itself run with full attention"
    return found + compare(runs).judge(claim, {"own": 1.0, "full": -1.0}, -0.02, 0.02)
