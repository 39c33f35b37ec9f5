"""F18: how far models read that were trained at 8K: windows and MoBA without positions beside full attention with RoPE.

Every second layer of a hybrid attends far, without positions (NoPE) or with; the others have a window of 512 tokens
with RoPE. This is how FlashMoBA and HSA are built. All arms are trained at 8K, a fifth of the tokens documents with
hidden numbers, and read at up to 128K, full attention also with YaRN.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, FULL, GREEN, MOBA, PURPLE, band, powers_of_two
from experiments.comparison import Cell, Verdict, compare
from experiments.corpus import Corpus
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL as FULL_ATTENTION
from experiments.models import batch_tokens, recipe
from experiments.needle_documents import SHARE, needle_corpus, write_needles
from experiments.readings import keys_text
from moba_train.config.base import format_count

SIZE = "10m"
TOKENS = 100_000_000
SEQ_LEN = 8192
FURTHEST = 131_072
QUICK_SEQ_LEN, QUICK_FURTHEST = 512, 2048
PLAIN, YARN = "far", "yarn"
"""Evaluations at the furthest length, by name: as trained, and with RoPE scaled to it."""
_LAYERS = "every:2"
_NOPE = {"overrides": {_LAYERS: {"kind": "nope"}}}


def _hybrid(window: int, **far: Any) -> dict[str, Any]:
    return {"default": "window", "window": {"window": window}, "overrides": {_LAYERS: far}}


def _kinds(quick: bool) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Sections `attention` and, in part, `rope` of each arm."""
    window, block, topk = (64, 32, 3) if quick else (512, 128, 8)
    moba = _hybrid(window, kind="moba", block_size=block, topk=topk)
    return {
        "full": (FULL_ATTENTION, {}),
        "moba-nope": (moba, _NOPE),
        "full-nope": (_hybrid(window, kind="full"), _NOPE),
        "moba-rope": (moba, {}),
    }


SHOWN: dict[str, tuple[str, str]] = {
    "full": ("full, RoPE", FULL),
    "full, YaRN": ("full, RoPE scaled by YaRN", BLUE),
    "moba-nope": ("window + MoBA without positions", MOBA),
    "full-nope": ("window + full without positions", GREEN),
    "moba-rope": ("window + MoBA, RoPE", PURPLE),
}
"""Label and colour of each way to read, by arm."""


class Extrapolation(Figure):
    """Loss by position and needles beyond the trained length: hybrids without positions, full attention with RoPE."""

    name = "extrapolation"
    title = "F18. Reading beyond the trained length"
    seeds: ClassVar[tuple[int, ...]] = (0, 1, 2)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Full attention, the hybrid in question, then what tells its parts from each other."""
        return [_arm(name, seed, *kind, quick) for name, kind in _kinds(quick).items()]

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """The documents with hidden numbers."""
        length, tokens = (QUICK_SEQ_LEN, 1 << 15) if quick else (SEQ_LEN, int(SHARE * TOKENS))
        write_needles(corpus, folder, length, tokens)

    def find(self, results: Sequence[Result]) -> Finding:
        """Loss and needles at each length, for each arm and way to read it."""
        results = [result for result in results if PLAIN in result["evaluations"]]
        lengths = _lengths(results)
        heads = [f"{what} {format_count(length, 1024)}" for what in ("loss at", "needles") for length in lengths]
        rows = [["read as", "mean keys", *heads, "seeds"]]
        for way in SHOWN:
            own = [result for result in results if way in _ways(result)]
            if own:
                cells = [
                    f"{statistics.mean(value(one, way, length) for one in own):.3f}"
                    for value in (loss_at, needles_at)
                    for length in lengths
                ]
                rows.append([way, keys_text(own[0]), *cells, str(len(own))])
        return Finding(_verdicts(results), rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Left: loss by position. Right: needles by length of the text; bands over seeds."""
        left, right = canvas.subplots(1, 2, sharex=True)
        lengths = _lengths(results)
        for way, (label, colour) in SHOWN.items():
            own = [result for result in results if way in _ways(result)]
            if own:
                ends = _bucket(own[0]) * np.arange(1, len(curve(own[0], way)) + 1)
                band(left, ends, [curve(one, way) for one in own], colour, label)
                found = [[needles_at(one, way, length) for length in lengths] for one in own]
                band(right, lengths, found, colour, marker="o")
        if lengths:
            left.axvline(_trained(results), color=FULL, lw=0.8)
            right.axvline(_trained(results), color=FULL, lw=0.8)
            powers_of_two(left, lengths)
        left.set_ylabel("loss, nats")
        right.set_ylabel("share of needles found")
        right.set_ylim(-0.03, 1.03)
        left.set_xlabel("position, tokens")
        right.set_xlabel("tokens of the text")
        canvas.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)


def _arm(name: str, seed: int, attention: Mapping[str, Any], rope: Mapping[str, Any], quick: bool) -> Arm:
    seq_len, furthest = (QUICK_SEQ_LEN, QUICK_FURTHEST) if quick else (SEQ_LEN, FURTHEST)
    tokens, batch = (4096, 1024) if quick else (TOKENS, batch_tokens(SEQ_LEN))
    content = recipe("small" if quick else SIZE, attention, seq_len, tokens, batch, {"sequences": 2 if quick else 64})
    content["model"]["rope"] |= rope
    asked = ["--seq-len", str(furthest), "--attention", "own", "--tasks", "position_wise,needle", *_asked(quick)]
    evaluations = {PLAIN: asked}
    if name == "full":
        scaled = {"kind": "yarn", "factor": furthest // seq_len, "original_seq_len": seq_len}
        evaluations[YARN] = [*asked, *(f"model.rope.{key}={value}" for key, value in scaled.items())]
    return Arm(name, seed, content, evaluations, added={needle_corpus(seq_len): SHARE})


def _asked(quick: bool) -> list[str]:
    """Keys of the evaluations at the furthest length."""
    seq_len, furthest, bucket, sequences = (QUICK_SEQ_LEN, 2048, 256, 2) if quick else (SEQ_LEN, FURTHEST, 2048, 16)
    lengths = [seq_len << step for step in range((furthest // seq_len).bit_length())]
    depths, samples = ([0], 1) if quick else ([0, 20, 40, 60, 80], 4)
    return [
        f"evaluation.position_wise={{bucket: {bucket}, sequences: {sequences}}}",
        f"evaluation.needle.lengths={lengths}",
        f"evaluation.needle.depths={depths}",
        f"evaluation.needle.samples={samples}",
    ]


def _ways(result: Result) -> list[str]:
    """Keys of `SHOWN`: the arm's own name, and full attention also with YaRN."""
    return [result["name"], *([f"{result['name']}, YaRN"] if YARN in result["evaluations"] else [])]


def _evaluation(result: Result, way: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = result["evaluations"][PLAIN if way == result["name"] else YARN]
    return found


def _bucket(result: Result) -> int:
    return int(result["evaluations"][PLAIN]["position_wise"]["bucket"])


def _needle_map(result: Result, way: str) -> tuple[Sequence[int], npt.NDArray[np.float64]]:
    """Lengths, and the share that is found at each, over depths."""
    data = _evaluation(result, way)["needle"]
    (one,) = data["maps"].values()
    return data["lengths"], np.array(one["passed"], dtype=np.float64).mean(axis=1)


def _lengths(results: Sequence[Result]) -> list[int]:
    """Tokens of the texts with needles: the trained length, then twice as many each time."""
    return list(_needle_map(results[0], results[0]["name"])[0]) if results else []


def _trained(results: Sequence[Result]) -> int:
    return int(results[0]["recipe"]["stages"][-1]["seq_len"])


def curve(result: Result, way: str) -> npt.NDArray[np.float64]:
    """Loss of each bucket of the furthest length."""
    (found,) = _evaluation(result, way)["position_wise"]["curves"].values()
    return np.array(found["mean"], dtype=np.float64)


def loss_at(result: Result, way: str, length: int) -> float:
    """Loss of the last bucket of the first `length` tokens."""
    return float(curve(result, way)[length // _bucket(result) - 1])


def needles_at(result: Result, way: str, length: int) -> float:
    """Share of the needles that are found in texts of `length` tokens."""
    lengths, found = _needle_map(result, way)
    return float(found[list(lengths).index(length)])


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Claims that were written down before the first arm was trained."""
    if not results:
        return []
    trained, *_, furthest = _lengths(results)
    at = format_count(furthest, 1024)
    found = []
    for way, low, high, words in (
        ("moba-nope", -math.inf, 0.02, "rises by at most 0.02 nats"),
        ("full", 0.5, math.inf, "rises by at least 0.5 nats"),
    ):
        cells = [
            Cell(place, f"seed {one['seed']}", loss_at(one, way, length))
            for one in results
            if way in _ways(one)
            for place, length in (("trained", trained), ("far", furthest))
        ]
        claim = f"From the end of the trained length to {at}, the loss of {SHOWN[way][0]} {words}"
        found += compare(cells).judge(claim, {"far": 1.0, "trained": -1.0}, low, high)
    losses, needles = (
        compare([Cell(way, f"seed {one['seed']}", value(one, way, furthest)) for one in results for way in _ways(one)])
        for value in (loss_at, needles_at)
    )
    hybrid = SHOWN["moba-nope"][0]
    for comparison, other, low, high, words in (
        (losses, "full, YaRN", -math.inf, 0.0, "is below that of full attention with YaRN"),
        (losses, "full-nope", -0.02, 0.02, "is within 0.02 of that of full attention in these layers"),
        (losses, "moba-rope", -math.inf, 0.0, "is below that with RoPE in these layers"),
    ):
        claim = f"At {at} the loss of {hybrid} {words}"
        found += comparison.judge(claim, {"moba-nope": 1.0, other: -1.0}, low, high)
    claim = f"At {at}, {hybrid} finds at least 0.3 more of the needles than full attention with YaRN"
    return found + needles.judge(claim, {"moba-nope": 1.0, "full, YaRN": -1.0}, 0.3, math.inf)
